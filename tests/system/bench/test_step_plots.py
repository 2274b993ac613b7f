"""Kernels of a step belong to groups, and result files become plots."""

import json

import pytest
from support.processes.server_process import ROOT

from bench.report import PLOTS
from bench.step_plots import ms_by_group

RESULTS = ROOT / "bench" / "results"


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void lora_jax::attention_kernel<lora_jax::PromptConsumer<8, 16> >", "attention"),
        ("void lora_jax::combine_kernel<8, __nv_bfloat16>", "attention"),
        ("_grouped_matmul_kernel_mosaic_gpu_kernel", "products"),
        ("void lora_jax::dense_rows_kernel<48, 2>", "products"),
        ("void lora_jax::few_rows_kernel<(lora_jax::Coding)4, 1>", "products"),
        ("void lora_jax::few_kernel<3, 34816, 64>", "adapters"),
        ("void lora_jax::pair_kernel<3, 36864, 32>", "adapters"),
        ("void lora_jax::cluster_rows_kernel<false>", "router, rows of experts"),
        ("lora_jax::take_rows_kernel(lora_jax::TakeRowsArgs)", "router, rows of experts"),
        ("void lora_jax::f32_parts_kernel<lora_jax::PartsTile<1, 2, 1, 1, 4> >", "router"),
        ("void lora_jax::rms_norm_kernel<8>", "norms, rotary embedding"),
        ("loop_add_fusion_50", "all else"),
    ],
)
def test_a_kernel_is_of_one_group(kernel, group):
    found = {name for name, ms in ms_by_group({kernel: [48, 2000.0]}).items() if ms == 2.0}
    assert len(found) == 1
    assert found.pop().startswith(group)


@pytest.mark.parametrize(
    "name",
    [
        "step_limits_qwen3-30b-a3b_nvidia_h200_2026-11-30_3",
        "cpu_quantised_heads_avx512_2026-11-30",
    ],
)
def test_a_result_file_becomes_a_plot(tmp_path, name):
    plot = next(plot for prefix, plot in PLOTS.items() if name.startswith(prefix))
    plot(json.loads((RESULTS / f"{name}.json").read_text()), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
