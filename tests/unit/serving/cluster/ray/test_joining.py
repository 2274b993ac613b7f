"""Options that cannot work on Ray's hosts are refused before a process starts; Ray is a double."""

import dataclasses
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support.processes.server_process import ROOT

from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.cli.options import Options
from serving.cli.serve import StartError
from serving.cluster.ray import joining
from serving.cluster.ray.groups import HostRoom
from serving.cluster.ray.joining import check_ray, ray_hosts
from serving.http.settings import HttpSettings

TOKENS = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": "head:6379", "JAX_PLATFORMS": "cpu", "HOME": "/"}


ERRORS = SimpleNamespace(RayError=OSError)


def options(**cluster):
    engine = EngineConfig("m", tensor_parallel_size=cluster.pop("devices", 1))
    config = ClusterConfig(distributed_executor_backend="ray", **cluster)
    return Options(engine, HttpSettings(), config)


@pytest.fixture
def made(monkeypatch):
    """Calls of Ray, and of what takes its hosts."""
    calls = SimpleNamespace(joined=[], left=0, groups=None, rooms=[HostRoom("a", 8, 8)] * 2)

    def init(**given):
        calls.joined.append(given["address"])
        if given["address"].startswith("nowhere"):
            raise ConnectionError("Failed to connect to Ray cluster.\nmore")

    def leave():
        calls.left += 1

    def hosts(groups, config, passed, *, needs_tokens):
        calls.groups, calls.passed, calls.needs_tokens = groups, passed, needs_tokens
        return "hosts"

    ray = SimpleNamespace(init=init, shutdown=leave, exceptions=ERRORS)
    of_hosts = SimpleNamespace(RayHosts=hosts, rooms=lambda: calls.rooms)
    monkeypatch.setenv("RAY_ENABLE_AUTO_CONNECT", "1")
    monkeypatch.setattr(joining.socket, "create_connection", lambda *given: socket.socket())
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(joining.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "serving.cluster.ray.hosts", of_hosts)
    return calls


def test_a_cluster_is_joined_and_its_hosts_are_taken(made):
    more = {"NCCL_DEBUG": "INFO", "XLA_FLAGS": "--a", "UCX_TLS": "tcp", "NVSHMEM_DEBUG": "1"}
    more |= {"LORA_JAX_OPS": "xla", "JAX_PLATFORMS": "cpu"}
    given, hosts = ray_hosts(options(devices=16), TOKENS | more)
    assert (hosts, made.joined, made.left) == ("hosts", ["head:6379"], 0)
    assert given.cluster.nnodes == 2  # 16 GPUs are on two hosts
    assert made.passed == more
    assert os.environ["RAY_ENABLE_AUTO_CONNECT"] == "0"
    assert made.needs_tokens


def test_without_tokens_a_cluster_is_refused_unless_it_may_be_open(made, caplog):
    for environ in ({}, {"RAY_AUTH_MODE": "disabled"}):
        with pytest.raises(StartError, match=r"set RAY_AUTH_MODE=token .* --insecure takes"):
            check_ray(options(), environ)
    check_ray(options(), TOKENS)
    is_open = dataclasses.replace(options(), insecure=True)
    check_ray(is_open, {})
    ray_hosts(is_open, {})
    assert (made.joined, made.needs_tokens) == (["auto"], False)
    assert "Ray requires no token" in caplog.text


def test_a_cluster_that_is_not_there_is_told_with_what_to_do(made):
    message = "Cannot join the Ray cluster at nowhere:1: Failed to connect to Ray cluster. Start it"
    with pytest.raises(StartError, match=message):
        ray_hosts(options(), TOKENS | {"RAY_ADDRESS": "nowhere:1"})


def test_where_nobody_listens_ray_is_not_asked(made, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(joining.importlib.util, "find_spec", lambda name: name)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=rf"Ray cluster at {address}: .*refused.* Start it"):
            check_ray(options(), TOKENS | {"RAY_ADDRESS": address})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"devices": 8, "instances": 3}, "Cannot serve on Ray's hosts: There is no room for inst"),
        ({"devices": 32}, "cannot be divided over the GPUs of the cluster"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_cluster_left(made, given, message):
    with pytest.raises(StartError, match=message):
        ray_hosts(options(**given), TOKENS)
    assert made.left == 1


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(joining.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartError, match=r"pip install 'lora-jax\[cluster\]'"):
        check_ray(options(), TOKENS)


def test_what_is_known_is_told_without_jax_and_ray():
    code = "import sys, serving.cluster.ray.joining as _; "
    code += "sys.exit(bool({'jax', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
