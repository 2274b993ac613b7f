"""NVSHMEM is found, or said to be missing; transport/test_symmetric.py has it emulated."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape
from support.processes.server_process import ROOT
from support.processes.world_server import WorldServer

from cuda_backend import nvshmem


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="nvidia-nvshmem-cu13"):
        nvshmem.package()

    def none(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", none)
    with pytest.raises(NotImplementedError, match="GPUs of one host"):
        nvshmem.package()


def test_the_package_is_where_its_host_library_is(monkeypatch, tmp_path):
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path / "a"), str(tmp_path / "b")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    (tmp_path / "b" / "lib").mkdir(parents=True)
    (tmp_path / "b" / "lib" / "libnvshmem_host.so.3").touch()
    assert nvshmem.package() == tmp_path / "b"
    made = nvshmem.library(tmp_path / "b")
    assert all(source.exists() for source in made.sources)
    assert f"-I{tmp_path / 'b' / 'include'}" in made.flags


def test_what_the_user_has_set_stays(monkeypatch):
    for name in (*nvshmem.ONE_HOST, *nvshmem.SEVERAL_HOSTS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "eth7")
    nvshmem.configure(one_host=True)
    assert os.environ["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    assert os.environ["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == "eth7"
    monkeypatch.delenv("NVSHMEM_REMOTE_TRANSPORT")
    nvshmem.configure(one_host=False)
    assert os.environ["NVSHMEM_IB_ENABLE_IBGDA"] == "1"


def check_exchanges(folder, *words):
    """Run the bench, which compares every bit, and check how its killed server ended a wait."""
    command = [sys.executable, "-m", "bench.nvshmem", "--out", str(folder), *words]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    found = json.loads((folder / "nvshmem.json").read_text())
    assert found["killed"]["status"] == "ABORTED"
    assert found["killed"]["unchanged"]


@pytest.mark.gpu
def test_rows_and_results_between_two_processes_of_one_gpu(tmp_path, monkeypatch):
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # they share its memory
    check_exchanges(tmp_path, "--one-gpu")


@pytest.mark.multigpu
def test_rows_and_results_between_two_gpus(tmp_path):
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("needs two NVIDIA GPUs")
    check_exchanges(tmp_path)


@pytest.mark.multigpu
def test_a_command_begins_a_world_and_restarts_it(tmp_path):
    """A rank and an instance on a GPU each: the answers of one process, also after a kill."""
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("needs two NVIDIA GPUs")
    shape = TinyShape(vocab=512, max_positions=96, experts=4, hidden=256, width=128, layers=2)
    tiny_checkpoint.write_model(tmp_path / "model", shape)
    tiny_checkpoint.write_adapter(tmp_path / "a0", shape, 3, seed=0)
    files = str(tmp_path / "model"), {"a0": str(tmp_path / "a0")}
    flags = "--max-model-len 64 --max-num-seqs 4 --max-num-batched-tokens 8 --max-loras 2 "
    flags += "--max-lora-rank 8 --max-esft-adapters 0 --no-structured-outputs"
    asked = ["a0", None], [[5, 6, 7], [8, 9]], 12
    with contextlib.ExitStack() as stack:
        alone = WorldServer(files, tmp_path / "alone", stack, flags.split(), os.environ)
        want = alone.answers(*asked)
        alone.end()
        served = WorldServer(files, tmp_path / "world", stack, flags.split(), os.environ, 1)
        assert served.answers(*asked) == want
        served.lose(served.roles()[-1], signal.SIGKILL, asked, want)
