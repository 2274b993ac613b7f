"""One command, several processes: their answers are those of one, whoever is killed."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import httpx
import pytest
from support.cases import lora_server_cases as cases
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import listening, serve_app
from support.processes.server_process import ROOT, free_port, post, serve

from serving import Engine, Sampling
from serving.api.cluster_config import ClusterConfig
from serving.api.config import EngineConfig
from serving.cli.options import Options
from serving.cli.serve import StartError
from serving.cluster import front
from serving.cluster.adapter_changes import AdapterChanges
from serving.cluster.router import Router
from serving.http.access.audit import AuditLog
from serving.http.access.keys import KeyRing
from serving.http.app import create_app
from serving.http.settings import HttpSettings
from serving.runtime import socket_folder

GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
MODELS = ["a0", None, "a1", "a2", None, "a3"]
PROMPTS = cases.prompts_of(len(MODELS))


def flags():
    """The engine's sizes as the command line has them."""
    return cases.engine_flags()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return cases.write_files(tmp_path_factory.mktemp("front"))


@pytest.fixture(scope="module")
def url(files, tmp_path_factory):
    model, adapters = files
    roles = ["--instances", "2", "--lora-server", "2", "--placement", "ep2-pp1"]
    roles += ["--lora-server-wait-s", "30"]  # five processes share this machine's cores
    modules = ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    log = tmp_path_factory.mktemp("log") / "log"
    with serve(model, *roles, *flags(), *modules, log=log) as url:
        yield url
    text = log.read_text()
    assert "EP2-PP1 on 2 devices" in text
    assert "has failed" not in text


@pytest.fixture(scope="module")
def coupled(files):
    with Engine(*files, **cases.ENGINE) as engine:
        return [o.outputs[0].text for o in engine.generate(PROMPTS, MODELS, GREEDY)]


def ask(url, place):
    body = {
        "model": MODELS[place] or "model",
        "prompt": PROMPTS[place],
        "max_tokens": GREEDY.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return post(f"{url}/v1/completions", body)["choices"][0]["text"]


def test_answers_are_those_of_one_coupled_engine(url, coupled):
    assert [ask(url, place) for place in range(len(MODELS))] == coupled


def test_models_and_metrics_are_there(url):
    ask(url, next(place for place, model in enumerate(MODELS) if model))
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        names = {card["id"] for card in json.load(answer)["data"]}
    assert names == {"model", "a0", "a1", "a2", "a3"}
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    assert 'engine="0"' in text
    assert 'engine="1"' in text
    assert 'lora_jax:role_up{role="rank",number="1"} 1.0' in text
    assert 'lora_jax:lora_server_tier_hits_total{tier="disk",engine="front"}' in text
    loads = text.partition('lora_jax:lora_server_load_seconds_count{engine="front"} ')[2]
    assert float(loads.partition("\n")[0]) > 0


def children_of(pid):
    """Processes started by a process, oldest first."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ask_until_there(url, place, want):
    """Ask as a client that is told to try again; only right answers count."""
    for _ in range(600):
        try:
            assert ask(url, place) == want
            return
        except AssertionError as error:
            if not str(error).startswith("503"):
                raise
        time.sleep(0.2)
    raise AssertionError("no answer in two minutes")


@pytest.mark.slow
def test_every_role_may_be_killed(files, coupled, tmp_path):
    model, adapters = files
    port = free_port()
    command = [sys.executable, "-m", "serving.launch", model, "--port", str(port), *flags()]
    command += ["--instances", "2", "--lora-server", "2", "--lora-modules"]
    command += [f"{name}={path}" for name, path in adapters.items()]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    with (tmp_path / "log").open("w") as log:
        top = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert top.poll() is None, (tmp_path / "log").read_text()
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except (OSError, urllib.error.URLError):
                time.sleep(0.2)
        roles = children_of(top.pid)
        for victim in roles[1:]:  # the first belongs to multiprocessing itself
            os.kill(victim, signal.SIGKILL)
            for place, want in enumerate(coupled):
                ask_until_there(url, place, want)
        roles = children_of(top.pid)
        top.send_signal(signal.SIGTERM)
        top.wait(timeout=60)
        for _ in range(600):
            if not any(is_alive(role) for role in roles):
                break
            time.sleep(0.1)
        assert not any(is_alive(role) for role in roles)
    finally:
        top.kill()
        top.wait()


@pytest.mark.slow
def test_roles_end_with_a_supervisor_that_is_killed(files, tmp_path):
    command = [sys.executable, "-m", "serving.launch", files[0], "--port", str(free_port())]
    command += [*flags(), "--instances", "1", "--lora-server", "1"]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env["TMPDIR"] = folder = tempfile.mkdtemp()  # short: sockets lie in it
    with (tmp_path / "log").open("w") as log:
        top = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
    try:
        for _ in range(600):
            if "Ready" in (tmp_path / "log").read_text():
                break
            assert top.poll() is None
            time.sleep(0.2)
        roles = children_of(top.pid)
        assert len(roles) >= 2
        assert len(os.listdir(folder)) == 2
    finally:
        top.kill()
        top.wait()
    for _ in range(600):
        if not any(is_alive(role) for role in roles):
            break
        time.sleep(0.1)
    assert not any(is_alive(role) for role in roles), "a role has outlived its supervisor"
    assert not os.listdir(folder)
    os.rmdir(folder)


def test_what_is_impossible_is_refused_before_anything_starts(files, monkeypatch):
    monkeypatch.setattr(front, "LocalCluster", None)
    cluster = ClusterConfig(instances=2, lora_server=2, placement="ep4-pp1")
    options = Options(EngineConfig(model=files[0]), HttpSettings(), cluster)
    with socket.socket() as sock, pytest.raises(StartError, match="choose from ep1-pp2, ep2-pp1"):
        front.serve_cluster(options, sock)


def test_a_role_that_cannot_start_is_a_start_error(files, monkeypatch):
    def no_cluster(options, spec, hosts):
        assert spec.placement == "ep2-pp1"
        raise ConnectionError("Instance 1 did not start")

    monkeypatch.setattr(front, "LocalCluster", no_cluster)
    cluster = ClusterConfig(instances=2, lora_server=2)
    options = Options(EngineConfig(model=files[0]), HttpSettings(), cluster)
    with socket.socket() as sock, pytest.raises(StartError, match="Instance 1 did not start"):
        front.serve_cluster(options, sock)


def test_sigterm_during_the_start_ends_the_roles_and_removes_their_folder(
    files, monkeypatch, tmp_path
):
    """The folder is there before the first role, which would remove it with its supervisor gone."""

    def start_all(cluster, spec):
        assert os.listdir(tmp_path) == [cluster._folder.name]
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)  # the handler runs before it ends

    monkeypatch.setattr(socket_folder, "_LONGEST_PATH", 1000)  # no socket is made
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(front.LocalCluster, "_start_all", start_all)
    options = Options(EngineConfig(model=files[0]), HttpSettings(), ClusterConfig(instances=2))
    before = signal.getsignal(signal.SIGTERM)
    with socket.socket() as sock, pytest.raises(SystemExit):
        front.serve_cluster(options, sock)
    assert not os.listdir(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_front_counts_wrong_keys_and_writes_refusals_once(tmp_path):
    """Its instances never see them, and their own lines would say the same twice."""
    log = tmp_path / "audit"
    http = HttpSettings(api_keys=("right",), metrics_keys=("prom",), audit_log=str(log))
    engine = EngineConfig(model="base")
    options = Options(engine=engine, http=http, cluster=ClusterConfig(instances=2))
    inside = dataclasses.replace(http, is_behind_front=True)
    with contextlib.ExitStack() as stack:
        path = tmp_path / "i0"
        stack.enter_context(listening(create_app(FakeEngine(), inside), path))
        roles = SimpleNamespace(
            paths=[str(path)],
            router=Router(1),
            body_bytes=1 << 20,
            roles=lambda: {"instances": [True]},
            changes=AdapterChanges(None, lambda: ()),
            metrics_text=str,
        )
        app = front.front_app(roles, options, KeyRing(http), AuditLog(http.audit_log))
        url = stack.enter_context(serve_app(app))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=30))

        def status(key: str, method: str, path: str, **more) -> int:
            headers = {"Authorization": f"Bearer {key}", "X-Request-Id": f"{key}-{path[-4:]}"}
            answer = client.request(method, path, headers=headers, **more)
            assert answer.headers["X-Request-Id"] == headers["X-Request-Id"]
            return answer.status_code

        assert status("wrong", "GET", "/v1/models") == 401
        assert status("right", "GET", "/v1/models") == 200
        assert status("right", "GET", "/metrics") == 403
        text = client.get("/metrics", headers={"Authorization": "Bearer prom"}).text
    assert 'lora_jax:failed_keys_total{why="unknown",engine="front"} 1.0' in text
    assert text.count("# TYPE lora_jax:failed_keys_total counter") == 1
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["action"], line["status"]) for line in lines] == [
        ("failed key", 401),
        ("refused", 403),
    ]
