"""Reports of the assembler: registers and spills by kernel, each spill counted once."""

import os

from lora_jax.ops.ptxas import Report, read_reports, reports_in

TIGHT = """ptxas warning : Registers are spilled in 'a', 28 bytes spill stores, 36 bytes spill loads
ptxas info    : Compiling entry function 'a' for 'sm_90a'
    8 bytes stack frame, 28 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers
ptxas info    : Function properties for helper
    0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers
"""
ROOMY = """ptxas info    : Function properties for b
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 63 registers, used 4 barriers
"""


def test_a_kernel_is_its_largest_function_and_all_spills(tmp_path):
    (tmp_path / "a_0.ptxas").write_text(TIGHT)
    (tmp_path / "b_1.ptxas").write_text(ROOMY)
    (tmp_path / "b_1.ptx").write_text("not this one")
    assert read_reports(tmp_path) == {"a_0": Report(168, 68), "b_1": Report(63, 0)}


def test_reports_are_asked_for_within_the_block_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("MOSAIC_GPU_DUMP_TO", raising=False)
    with reports_in(tmp_path):
        assert os.environ["MOSAIC_GPU_DUMP_TO"] == str(tmp_path)
        assert os.environ["MOSAIC_GPU_DUMP_PTXAS"] == "1"
    assert "MOSAIC_GPU_DUMP_TO" not in os.environ
