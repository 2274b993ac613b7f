"""NVSHMEM is found, or said to be missing; transport/test_symmetric.py has it emulated."""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from support.processes.server_process import ROOT

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


@pytest.mark.multigpu
def test_rows_and_results_between_two_gpus(tmp_path):
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        pytest.skip("needs two NVIDIA GPUs")
    command = [sys.executable, "-m", "bench.nvshmem", "--out", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    found = json.loads((tmp_path / "nvshmem.json").read_text())
    assert found["killed"]["status"] == "ABORTED"
    assert found["killed"]["unchanged"]
