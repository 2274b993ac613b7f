"""nvcc from pip: found where the path has none, and its library runs on a Hopper GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cuda_backend import ffi, toolkit


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine without any nvcc, whose site-packages are a folder of the test."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(toolkit, "USUAL_FOLDER", tmp_path / "cuda" / "bin")
    site = [str(tmp_path / "site" / "nvidia")]
    spec = type("Spec", (), {"submodule_search_locations": site})
    monkeypatch.setattr(toolkit.importlib.util, "find_spec", lambda name: spec)
    return tmp_path


def test_the_path_comes_first_then_pip_then_the_usual_folder(machine):
    assert toolkit.find_compilers() == ()
    usual = executable(machine / "cuda/bin/nvcc")
    of_pip = executable(machine / "site/nvidia/cu13/bin/nvcc")
    on_path = executable(machine / "bin/nvcc")
    found = toolkit.find_compilers()
    assert [c.path for c in found] == [str(on_path), str(of_pip), str(usual)]
    assert [c.flags for c in found] == [(), (f"-L{machine}/site/nvidia/cu13/lib",), ()]


def test_one_file_under_two_names_is_one_compiler(machine):
    usual = executable(machine / "cuda/bin/nvcc")
    (machine / "bin").mkdir()
    (machine / "bin" / "nvcc").symlink_to(usual)
    assert [c.path for c in toolkit.find_compilers()] == [str(machine / "bin/nvcc")]


# A process that sees no toolkit but pip's, and builds the kernels into a folder of its own.
BUILDS = """
import logging, pathlib, sys
logging.basicConfig(level=logging.INFO)
from cuda_backend import ffi, toolkit
toolkit.USUAL_FOLDER = pathlib.Path("/nonexistent")
assert all("site-packages" in c.path or "nvidia/cu" in c.path for c in toolkit.find_compilers())
library = ffi.library().build(pathlib.Path(sys.argv[1]))
assert all(name.encode() in library.read_bytes() for name in ffi.TARGETS)
"""
RUNS = """
import functools, jax, numpy
from lora_jax.ops.cases import lora_case
from lora_jax.ops.lora_gemm import lora_gemm
case = lora_case(37, 192, 4096, ranks=(16, 8, 64), dtype="bfloat16")
run = functools.partial(lora_gemm, *case.arrays, max_rank=case.max_rank)
cuda, meaning = (
    numpy.asarray(jax.jit(functools.partial(run, implementation=name))(), numpy.float32)
    for name in ("cuda", "reference")
)
numpy.testing.assert_allclose(cuda, meaning, rtol=1.6e-2, atol=1.6e-2)
"""


def with_pips_compiler(program: str, folder: Path) -> None:
    """Run a program whose path has no nvcc and whose kernel cache is `folder`."""
    if not toolkit._in_site_packages():
        pytest.skip("nvidia-cuda-nvcc is not installed: pip install '.[cuda]'")
    places = os.environ["PATH"].split(os.pathsep)
    path = os.pathsep.join(p for p in places if not Path(p, "nvcc").exists())
    own = {"PATH": path, "LORA_JAX_CACHE": str(folder)}
    command = [sys.executable, "-c", program, str(folder)]
    environment = {**os.environ, **own, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "nvidia/cu" in done.stderr  # the log names the compiler
    assert "Compiled the CUDA kernels" in done.stderr


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_pips_compiler_builds_all_kernels(tmp_path):
    with_pips_compiler(BUILDS, tmp_path)


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_kernels_of_pips_compiler_run(tmp_path):
    with_pips_compiler(BUILDS + RUNS, tmp_path)


def test_without_any_the_error_names_the_package(machine, tmp_path):
    with pytest.raises(ffi.native.BuildError, match="nvidia-cuda-nvcc"):
        ffi.library().build(tmp_path)
