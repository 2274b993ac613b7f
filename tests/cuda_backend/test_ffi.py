"""Building the CUDA kernels: compiles without spills, is kept, and its absence is no error."""

import re
import subprocess

import pytest

from cuda_backend import ffi
from lora_jax.ops.cpu.build import BuildError

needs_nvcc = pytest.mark.skipif(ffi.find_compiler() is None, reason="no nvcc on this machine")

# So many that the CTAs that each kernel counts on fit the 65536 registers of an SM.
MOST_REGISTERS = {
    "pair_kernel": 128,  # 2 CTAs of 256 threads
    "metadata_kernel": 64,  # 1 CTA of 1024
    "merge_kernel": 255,  # 1 CTA of 256
    "attention_kernel": 168,  # 1 CTA of 288
    "combine_kernel": 64,
    "sort_block_kernel": 64,
    "place_blocks_kernel": 64,
    "attention_units_kernel": 64,
}
REPORT = re.compile(
    r"entry function '\w*?("
    + "|".join(sorted(MOST_REGISTERS, key=len, reverse=True))
    + r")\w*'.*?(\d+) bytes stack frame, "
    r"(\d+) bytes spill stores.*?Used (\d+) registers",
    re.DOTALL,
)


@needs_nvcc
def test_kernels_compile_for_hopper_without_spills(tmp_path):
    compiler = ffi.find_compiler()
    command = ffi.command(compiler, tmp_path / "kernels.so", "-Xptxas=-v")
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = REPORT.findall(done.stdout + done.stderr)
    assert {name for name, *_ in compiled} == set(MOST_REGISTERS)
    for name, stack, spilled, registers in compiled:
        assert (stack, spilled) == ("0", "0"), name
        assert int(registers) <= MOST_REGISTERS[name], name
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
