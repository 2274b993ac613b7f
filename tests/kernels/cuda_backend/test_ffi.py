"""Building the CUDA kernels: compiles without spills, is kept, and its absence is no error."""

import logging
import re
import subprocess
from pathlib import Path

import pytest
from support.checks.handlers import stateful

from cuda_backend import ffi
from cuda_backend.toolkit import find_compilers
from lora_jax.ops.native import BuildError, Compiler

needs_nvcc = pytest.mark.skipif(not find_compilers(), reason="no nvcc on this machine")

# So many that the CTAs that each kernel counts on fit the 65536 registers of an SM.
MOST_REGISTERS = {
    "pair_kernel": 128,  # 2 CTAs of 256 threads
    "both_kernel": 128,
    "pair_tiles_kernel": 128,
    "shrink_kernel": 128,
    "few_kernel": 128,
    "gated_kernel": 128,
    "joined_kernel": 128,
    "gated_tiles_kernel": 255,  # 1 CTA of 256; 2 at ranks to 16
    "int8_shrink_kernel": 128,
    "int8_expand_kernel": 128,
    "metadata_kernel": 64,  # 1 CTA of 1024
    "merge_kernel": 240,  # 1 CTA of 256
    "row_tiles_kernel": 64,
    "shrink_tiles_kernel": 128,  # 2 CTAs of 256
    "expand_tiles_kernel": 255,  # 1 CTA of 256
    "plain_attention_kernel": 255,  # 1 CTA of 128
    "attention_kernel": 168,  # 1 CTA of 384, which then share them out otherwise
    "image_heads_kernel": 64,
    "image_attention_kernel": 128,  # 1 CTA of 512, which then share them out otherwise
    "dense_matmul_kernel": 128,  # the same
    "dense_rows_kernel": 204,  # 1 CTA of 320
    "coded_attention_kernel": 128,  # 1 CTA of 512, which then share them out otherwise
    "combine_kernel": 128,  # 4 CTAs of 128
    "count_rows_kernel": 64,
    "sort_rows_kernel": 64,
    "cut_rows_kernel": 64,
    "attention_units_kernel": 64,
    "grouped_f32_kernel": 128,  # 4 CTAs of 128
    "grouped_f32_tiles_kernel": 255,  # 1 CTA of 256
    "few_rows_kernel": 200,  # 2 CTAs of 160; 136 with 3
    "layer_norm_kernel": 128,  # 2 CTAs of 256
    "rms_norm_kernel": 80,  # 3 CTAs of 256
    "silu_times_kernel": 32,
    "choose_experts_kernel": 64,
    "take_rows_kernel": 64,  # 4 CTAs of 256
    "keep_likely_kernel": 32,  # 2 CTAs of 1024
    "place_heads_kernel": 64,
    "board_wait_kernel": 32,
    "board_copy_kernel": 32,
    "push_kernel": 64,  # few, so that it fits beside others
    "await_kernel": 64,
    "respond_kernel": 128,  # one CTA an SM: there are as many as SMs
    "wait_add_kernel": 128,  # one CTA an SM, too
    "receive_kernel": 128,  # 2 CTAs of 256
    "judge_kernel": 64,
}
# Bytes that one instance keeps in memory: prompts by heads of 128 in 8 bits.
MOST_STACK = {"coded_attention_kernel": 8}
REPORT = re.compile(
    r"entry function '\w*?("
    + "|".join(sorted(MOST_REGISTERS, key=len, reverse=True))
    + r")\w*'.*?(\d+) bytes stack frame, "
    r"(\d+) bytes spill stores.*?Used (\d+) registers",
    re.DOTALL,
)


@needs_nvcc
@pytest.mark.aot  # a minute of compiling: make test-aot
@pytest.mark.timeout(900)
def test_kernels_compile_for_hopper_without_spills(tmp_path):
    compiler = find_compilers()[0]
    command = ffi.library().command(compiler, tmp_path / "kernels.so", "-Xptxas=-v")
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = REPORT.findall(done.stdout + done.stderr)
    assert {name for name, *_ in compiled} == set(MOST_REGISTERS)
    for name, stack, spilled, registers in compiled:
        most = MOST_STACK.get(name, 0)
        assert int(stack) <= most, name
        assert most or spilled == "0", name
        assert int(registers) <= MOST_REGISTERS[name], name
    library = (tmp_path / "kernels.so").read_bytes()
    assert all(name.encode() in library for name in ffi.TARGETS)


def test_one_library_of_all_files_goes_to_xlas_gpu_platform():
    library = ffi.library()
    assert (library.platform, library.targets) == ("CUDA", ffi.TARGETS)
    assert set(library.stateful) == stateful() < set(library.targets)
    command = library.command(Compiler("nvcc"), Path("out.so"))
    units = {str(Path(part).relative_to(ffi.CSRC)) for part in command if part.endswith(".cu")}
    assert units >= {f"{op}/handlers.cu" for op in ("lora_gemm", "merge", "paged_attention")}
    assert {path.suffix for path in library.sources} == {".cu", ".cuh"}


def test_no_compiler_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(ffi.toolkit, "find_compilers", lambda: ())
    with pytest.raises(BuildError, match="no nvcc"):
        ffi.library().build(tmp_path)


def test_without_a_compiler_the_kernels_are_off(monkeypatch, caplog):
    monkeypatch.setattr(ffi.toolkit, "find_compilers", lambda: ())
    with caplog.at_level(logging.WARNING):
        assert not ffi.available.__wrapped__()
    assert "no nvcc" in caplog.text
