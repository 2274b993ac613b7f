"""Building the CUDA kernels: compiles without spills, is kept, and its absence is no error."""

import re
import subprocess

import pytest

from cuda_backend import ffi
from lora_jax.ops.cpu.build import BuildError

needs_nvcc = pytest.mark.skipif(ffi.find_compiler() is None, reason="no nvcc on this machine")


@needs_nvcc
def test_kernels_compile_for_hopper_without_spills(tmp_path):
    compiler = ffi.find_compiler()
    command = ffi.command(compiler, tmp_path / "kernels.so", "-Xptxas=-v")
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = done.stdout + done.stderr
    kernels = re.findall(r"Compiling entry function '\w*?(pair_kernel|metadata_kernel)", report)
    assert sorted(kernels) == ["metadata_kernel", "pair_kernel", "pair_kernel"]
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill", report)
    assert spills == [("0", "0")] * 3
    # Two CTAs of 256 threads share an SM's 65536 registers.
    assert max(int(n) for n in re.findall(r"Used (\d+) registers", report)) <= 128
    library = (tmp_path / "kernels.so").read_bytes()
    assert all(name.encode() in library for name in ffi.TARGETS)


def test_the_compiled_library_is_kept(tmp_path, monkeypatch):
    built = []

    def compile_once(compiler, library):
        built.append(library)
        library.write_bytes(b"")

    monkeypatch.setattr(ffi, "find_compiler", lambda: "/bin/true")
    monkeypatch.setattr(ffi, "_compile", compile_once)
    assert ffi.build(tmp_path) == ffi.build(tmp_path) == built[0]
    assert len(built) == 1


def test_no_compiler_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(ffi, "find_compiler", lambda: None)
    with pytest.raises(BuildError, match="no nvcc"):
        ffi.build(tmp_path)


def test_a_failing_compiler_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(ffi, "find_compiler", lambda: "/bin/false")
    with pytest.raises(BuildError, match="nvcc failed"):
        ffi.build(tmp_path)
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]
