"""LoRA for an NPU over a double of vllm-ascend's operators: values, and everything refused."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.cases.kernel_calls import lora_kernel

from lora_jax.ops.lora_gemm import reference
from npu_backend import lora

TOL = {"rtol": 2e-2, "atol": 2e-2}


def random(*shape, dtype=torch.bfloat16, seed=0) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(values / 4).to(dtype)


def make_adapters(ranks, d_in, d_out, padded) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [
        lora.pad_ranks(random(rank, d_in, seed=i), random(d_out, rank, seed=i + 9), padded)
        for i, rank in enumerate(ranks)
    ]
    return torch.stack([a for a, _ in pairs]), torch.stack([b for _, b in pairs])


@pytest.mark.parametrize(
    ("rank", "padded"), [(1, 8), (8, 8), (9, 16), (16, 16), (20, 32), (33, 64), (64, 64)]
)
def test_ranks_are_filled_up_to_what_expand_implements(rank, padded):
    assert lora.padded_rank(rank) == padded
    a, b = lora.pad_ranks(random(rank, 32), random(48, rank), padded)
    assert (a.shape, b.shape) == ((padded, 32), (48, padded))
    assert (a[rank:] == 0).all()
    assert (b[:, rank:] == 0).all()


def test_ranks_that_nothing_implements_are_refused():
    with pytest.raises(NotImplementedError, match="ranks up to 64, not 65"):
        lora.padded_rank(65)
    with pytest.raises(ValueError, match="rank 0"):
        lora.padded_rank(0)
    with pytest.raises(ValueError, match=r"A \(12, 32\) and B \(48, 12\) must share a rank <= 8"):
        lora.pad_ranks(random(12, 32), random(48, 12), 8)
    with pytest.raises(ValueError, match="must share a rank"):
        lora.pad_ranks(random(4, 32), random(48, 5), 8)


def test_adapters_of_different_ranks_are_added_as_the_reference_says(torch_npu):
    ranks, d_in, d_out = (3, 16, 8), 48, 32
    a, b = make_adapters(ranks, d_in, d_out, 16)
    x, y = random(6, d_in, seed=30), random(6, d_out, seed=31)
    scaling = torch.tensor([2.0, 0.5, 0.3])
    adapters = torch.tensor([1, -1, 0, 2, 1, -1])
    before = y.clone()
    got = lora.add_lora(y, x, a, b, scaling, adapters)
    assert got is y
    offsets = np.cumsum((0, *ranks[:-1]))
    entries = np.array([(o, o, r, 0, 0) for o, r in zip(offsets, ranks, strict=True)], np.int32)
    pool_a = torch.cat([a[i, :rank] for i, rank in enumerate(ranks)])
    pool_b = torch.cat([b[i, :, :rank].T for i, rank in enumerate(ranks)])
    want = lora_kernel(reference.lora_gemm)(
        *(jnp.asarray(array.float().numpy()) for array in (before, x, pool_a, pool_b)),
        jnp.asarray(entries),
        jnp.asarray(scaling.numpy()),
        jnp.asarray(adapters.numpy().astype(np.int32)),
        jnp.zeros(6, jnp.int32),
        16,
    )
    np.testing.assert_allclose(got.float().numpy(), np.asarray(want), **TOL)
    assert torch.equal(got[[1, 5]], before[[1, 5]])
    assert [name for name, _ in torch_npu.calls] == ["bgmv_shrink", "bgmv_expand"]


@pytest.mark.parametrize("dtype", lora.DTYPES)
def test_segments_are_rows_in_runs(torch_npu, dtype):
    a, b = (array.to(dtype) for array in make_adapters((8, 8), 32, 48, 8))
    x = random(7, 32, dtype=dtype)
    segments, lengths = torch.tensor([1, -1, 0]), torch.tensor([3, 1, 2])
    rows = torch.tensor([1, 1, 1, -1, 0, 0, -1])  # the last is in no segment
    by_row, by_segment = lora.shrink(x, a, rows), lora.shrink(x, a, segments, lengths)
    assert torch.equal(by_row, by_segment)
    assert (by_row[[3, 6]] == 0).all()
    ys = [torch.ones((7, 80), dtype=dtype) for _ in range(2)]
    lora.expand(ys[0], by_row, b, rows, offset=16)
    lora.expand(ys[1], by_row, b, segments, lengths, offset=16)
    assert torch.equal(*ys)
    assert (ys[0][:, :16] == 1).all()
    assert (ys[0][:, 64:] == 1).all()
    assert torch.equal(ys[0][0, 16:64], (1 + b[1].float() @ by_row[0]).to(dtype))
    names = [name for name, _ in torch_npu.calls]
    assert names == ["bgmv_shrink", "sgmv_shrink", "bgmv_expand", "sgmv_expand"]


def test_no_rows_call_nothing(torch_npu):
    a, b = make_adapters((8,), 32, 48, 8)
    none = torch.zeros(0, dtype=torch.int64)
    h = lora.shrink(random(0, 32), a, none)
    assert h.shape == (0, 8)
    lora.expand(random(0, 48), h, b, none)
    assert not torch_npu.calls


def test_experts_adapters_lie_one_after_another():
    slots = torch.tensor([0, -1, 2], dtype=torch.int32)
    experts = torch.tensor([3, 1, 0], dtype=torch.int32)
    got = lora.expert_adapters(slots, experts, 8)
    assert got.dtype == torch.int64
    assert got.tolist() == [3, -1, 16]


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"rank": 12}, ValueError, r"shrink: rank 12 is not one of \(8, 16, 32, 64\)"),
        ({"rank": 128, "d_in": 256}, ValueError, "rank 128 is not one of"),
        ({"dtype": torch.float32}, NotImplementedError, "float16 and bfloat16, not torch.float32"),
        ({"x_dtype": torch.float16}, ValueError, r"x float16\(5, 32\) and a bfloat16"),
        ({"x": (5, 48)}, ValueError, r"x bfloat16\(5, 48\) and a bfloat16\(2, 8, 32\) differ"),
        ({"rank": 32}, NotImplementedError, "d_in above the rank 32, not 32"),
        ({"d_in": 40}, NotImplementedError, "d_in in multiples of 16, not 40"),
        ({"rows": 4}, ValueError, r"adapters int64\(4,\) must be contiguous int64\(5,\)"),
        ({"index": torch.int32}, ValueError, r"adapters int32\(5,\) must be"),
        ({"lengths": torch.ones(2, dtype=torch.int64)}, ValueError, r"adapters int64\(5,\)"),
        ({"lengths": torch.ones(5, dtype=torch.int32)}, ValueError, r"lengths int32\(5,\) must be"),
    ],
)
def test_shrink_refuses_by_name(torch_npu, change, error, why):
    dtype, d_in = change.get("dtype", torch.bfloat16), change.get("d_in", 32)
    x = random(*change.get("x", (5, d_in)), dtype=change.get("x_dtype", dtype))
    a = random(2, change.get("rank", 8), d_in, dtype=dtype)
    adapters = torch.zeros(change.get("rows", 5), dtype=change.get("index", torch.int64))
    with pytest.raises(error, match=why):
        lora.shrink(x, a, adapters, change.get("lengths"))
    assert not torch_npu.calls


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"rank": 24}, ValueError, "expand: rank 24 is not one of"),
        ({"y_dtype": torch.float16}, ValueError, r"y float16\(5, 64\) and b bfloat16"),
        ({"h_dtype": torch.bfloat16}, ValueError, r"h bfloat16\(5, 8\) must be .* float32\(5, 8\)"),
        ({"h_rank": 16}, ValueError, r"h float32\(5, 16\) must be contiguous float32\(5, 8\)"),
        ({"offset": 48}, ValueError, r"columns 48 to 80 are not in y bfloat16\(5, 64\)"),
        ({"offset": -16}, ValueError, "columns -16 to 16 are not in y"),
        ({"rank": 64}, NotImplementedError, "d_out of at least the rank 64, not 32"),
        ({"offset": 8}, NotImplementedError, "offset in multiples of 16, not 8"),
        ({"d_out": 24}, NotImplementedError, "d_out in multiples of 16, not 24"),
        ({"width": 72}, NotImplementedError, "the width of y in multiples of 16, not 72"),
        ({"turned": True}, ValueError, "y bfloat16.* must be contiguous with 2 dimensions"),
    ],
)
def test_expand_refuses_by_name(torch_npu, change, error, why):
    rank = change.get("rank", 8)
    y = random(5, change.get("width", 64), dtype=change.get("y_dtype", torch.bfloat16))
    if change.get("turned"):
        y = random(64, 5).T
    h = random(5, change.get("h_rank", rank), dtype=change.get("h_dtype", torch.float32))
    b = random(2, change.get("d_out", 32), rank)
    with pytest.raises(error, match=why):
        lora.expand(y, h, b, torch.zeros(5, dtype=torch.int64), offset=change.get("offset", 0))
    assert not torch_npu.calls


def test_arrays_of_two_devices_are_refused(torch_npu):
    a, rows = random(2, 8, 32), torch.zeros(3, dtype=torch.int64)
    elsewhere = random(3, 32).to("meta")
    with pytest.raises(ValueError, match="arrays are on cpu, meta, not on one"):
        lora.shrink(elsewhere, a, rows)
    with pytest.raises(ValueError, match="expand: arrays are on cpu, meta"):
        lora.expand(elsewhere, torch.zeros(3, 8), random(2, 16, 8), rows)


def test_factors_must_be_one_for_each_adapter(torch_npu):
    a, b = make_adapters((8, 8), 32, 48, 8)
    rows = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"scaling float32\(3,\) must be float32\(2,\)"):
        lora.add_lora(random(3, 48), random(3, 32), a, b, torch.ones(3), rows)


@pytest.mark.parametrize("missing", ["torch_npu", "vllm_ascend.vllm_ascend_C"])
def test_without_the_operators_it_declines(torch_npu, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(NotImplementedError, match="needs vllm-ascend"):
        lora.shrink(random(1, 32), random(1, 8, 32), torch.zeros(1, dtype=torch.int64))
