"""Grouped matmul for an NPU over a double of torch_npu, and over pages of a double of AscendCL."""

import gc
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from support.doubles.driver_double import Double, compile_double

from lora_jax.memory.driver import DriverMemory
from lora_jax.memory.pool import PagePool
from lora_jax.memory.weight_tensor import WeightTensor
from lora_jax.ops.grouped_matmul import reference
from npu_backend import acl
from npu_backend import grouped_matmul as npu
from npu_backend.vmm import AscendDriver

CPU = torch.device("cpu")


def make_case(rows, groups, d_out, d_in, sizes, dtype=torch.float32):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((rows, d_in)).astype(np.float32)).to(dtype)
    w = torch.from_numpy(rng.standard_normal((groups, d_out, d_in)).astype(np.float32)).to(dtype)
    return x, w, torch.tensor(sizes, dtype=torch.int64)


@pytest.mark.parametrize("sizes", [(3, 0, 2), (0, 0, 0), (0, 7, 0), (7,), (2,)])
def test_rows_are_multiplied_as_the_reference_says(torch_npu, sizes):
    x, w, counts = make_case(7, len(sizes), 6, 5, sizes)
    got = npu.grouped_matmul(x, w, counts)
    want = reference.grouped_matmul(
        jnp.asarray(x.numpy()), jnp.asarray(w.numpy()), jnp.asarray(sizes, jnp.int32), None
    )
    np.testing.assert_allclose(got.numpy(), np.asarray(want), rtol=1e-5, atol=1e-5)
    assert (got[sum(sizes) :] == 0).all()
    # A list of counts of one group is refused, so there it goes as running sums.
    (call,) = torch_npu.calls
    assert call[1]["group_list_type"] == (len(sizes) > 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_keep_their_type(torch_npu, dtype):
    x, w, counts = make_case(5, 2, 16, 8, (3, 1), dtype)
    got = npu.grouped_matmul(x, w, counts)
    assert got.dtype == dtype
    torch.testing.assert_close(got[3], w[1] @ x[3], rtol=2e-2, atol=2e-2)


def test_experts_of_a_layer(torch_npu):
    x, gate_up, counts = make_case(6, 3, 8, 5, (2, 0, 3))
    down = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1))
    got = npu.gated_mlp(x, gate_up, down, counts)
    for t, g in enumerate((0, 0, 2, 2, 2)):
        gate, up = (gate_up[g] @ x[t]).chunk(2)
        torch.testing.assert_close(got[t], down[g] @ (torch.nn.functional.silu(gate) * up))
    assert (got[5] == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"x": (5, 7)}, ValueError, r"x torch.float32\(5, 7\), w torch.float32\(2, 6, 8\)"),
        ({"x": (5,)}, ValueError, "must be"),
        ({"x_dtype": torch.float16}, ValueError, "of one dtype"),
        ({"sizes": (1, 2, 3)}, ValueError, r"int64\(3,\) must be int64\(2,\)"),
        ({"sizes_dtype": torch.int32}, ValueError, r"int32\(2,\) must be int64\(2,\)"),
        ({"turned": True}, ValueError, "contiguous"),
        ({"dtype": torch.float64}, NotImplementedError, "bfloat16, float32, not torch.float64"),
        ({"groups": 1025}, NotImplementedError, "1024 groups, not 1025"),
        ({"d_in": 65536}, NotImplementedError, "d_in below 65536"),
    ],
)
def test_beyond_the_operator_is_refused_by_name(torch_npu, change, error, why):
    groups, d_in = change.get("groups", 2), change.get("d_in", 8)
    dtype = change.get("dtype", torch.float32)
    x = torch.zeros(change.get("x", (5, d_in)), dtype=change.get("x_dtype", dtype))
    w = torch.zeros((groups, 6, d_in), dtype=dtype)
    if change.get("turned"):
        w = torch.zeros((groups, d_in, 6)).transpose(1, 2)
    sizes = change.get("sizes", (1,) * groups)
    counts = torch.tensor(sizes, dtype=change.get("sizes_dtype", torch.int64))
    with pytest.raises(error, match=why):
        npu.grouped_matmul(x, w, counts)
    assert not torch_npu.calls


def test_without_torch_npu_it_declines(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(NotImplementedError, match="no torch_npu"):
        npu.grouped_matmul(*make_case(3, 2, 6, 5, (1, 1)))


@pytest.fixture
def weights(tmp_path):
    """Nine bf16 experts of 1.5 pages each over the double of AscendCL; holes may not be touched."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc on this machine")
    path = compile_double(Path(__file__).with_name("acl_double.c"), tmp_path)
    operations = ("reserve", "release", "create", "destroy", "map", "unmap", "copy")
    control = Double(path, operations, refusal=507899, no_memory=acl.OUT_OF_MEMORY)
    pool = PagePool(DriverMemory(AscendDriver(0, path)), page_bytes=2 << 20, budget_bytes=32 << 20)
    tensor = WeightTensor(pool, (9, 768, 2048), np.dtype(ml_dtypes.bfloat16))
    yield tensor
    gc.collect()  # the view, before its memory
    tensor.close()
    pool.trim()
    assert control.live() == (0, 0, 0)


def test_only_mapped_experts_are_read(torch_npu, weights):
    rng = np.random.default_rng(2)
    values = rng.standard_normal((3, *weights.shape[1:])).astype(weights.dtype)
    weights.map(range(1, 3))
    weights.write(1, values[:2])
    view = npu.weight_view(weights, CPU)
    assert (tuple(view.shape), view.dtype) == (weights.shape, torch.bfloat16)
    assert view.data_ptr() == weights.address
    x = torch.from_numpy(rng.standard_normal((5, 2048)).astype(np.float32)).bfloat16()

    def check(expert, written):
        sizes = torch.zeros(9, dtype=torch.int64)
        sizes[1], sizes[expert] = 2, 3
        got = npu.grouped_matmul(x, view, sizes)
        want = x[2:].float() @ torch.from_numpy(written.astype(np.float32)).T
        torch.testing.assert_close(got[2:].float(), want, rtol=1e-2, atol=1e-1)

    check(2, values[1])
    # What is loaded later is seen through the same view.
    weights.map(range(7, 8))
    weights.write(7, values[2:])
    check(7, values[2])


def test_weights_of_other_types_are_refused(torch_npu, weights):
    other = WeightTensor(weights.pool, (2, 4, 4), np.dtype(np.int8))
    with pytest.raises(ValueError, match="int8 are none of float16, bfloat16, float32"):
        npu.weight_view(other, CPU)
    other.close()


def test_a_torch_npu_without_the_constructors_is_said(torch_npu, weights, monkeypatch):
    monkeypatch.delattr(sys.modules["torch_npu"]._C, "_construct_storage_from_data_pointer")
    with pytest.raises(NotImplementedError, match="no foreign memory"):
        npu.weight_view(weights, CPU)
