"""Grouped LoRA row by row on a GPU: right, alone as in a batch, and taken where it should be."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.kernel_calls import lora_kernel
from support.oracles.tolerance import TOLERANCE

from cuda_backend import ffi, lora_gemm, lora_rows
from lora_jax.ops.cases import lora_case
from lora_jax.ops.lora_gemm import reference


@lora_kernel
def cuda_lora(y, batch):
    """The kernel of one linear map."""
    return lora_gemm.lora_gemm((y,), batch)[0]


KINDS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]


def kernel(*arrays, max_rank):
    return jax.jit(cuda_lora, static_argnums=8)(*arrays, max_rank)


def arguments(rows, d_out, d_in, dtype, y_dtype, **options):
    case = lora_case(rows, d_out, d_in, dtype=dtype, **options)
    y, *others = case.arrays
    experts = jnp.zeros(rows, jnp.int32) if case.row_to_expert is None else case.row_to_expert
    return (y.astype(y_dtype), *others[:6], experts), case.max_rank


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "y_dtype"), KINDS)
@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "experts"), [(1, 96, 128, 0), (70, 128, 96, 8), (300, 1100, 33, 2)]
)
def test_rows_are_the_references(rows, d_out, d_in, experts, dtype, y_dtype):
    arrays, max_rank = arguments(rows, d_out, d_in, dtype, y_dtype, num_experts=experts)
    got = np.asarray(kernel(*arrays, max_rank=max_rank), np.float64)
    wide = (a.astype(jnp.float32) for a in arrays[:4])
    want = lora_kernel(reference.lora_gemm)(*wide, *arrays[4:], max_rank)
    np.testing.assert_allclose(got, np.asarray(want, np.float64), **TOLERANCE[y_dtype])


@pytest.mark.gpu
def test_a_row_alone_has_the_bits_it_has_in_a_batch():
    arrays, max_rank = arguments(40, 96, 128, "float32", "float32", num_experts=4)
    y, x, *pools, slots, experts = arrays
    both = kernel(*arrays, max_rank=max_rank)
    for t in (0, 17, 39):
        row = slice(t, t + 1)
        alone = kernel(y[row], x[row], *pools, slots[row], experts[row], max_rank=max_rank)
        np.testing.assert_array_equal(alone[0], both[t])


@pytest.mark.parametrize(
    ("dtype", "y_dtype", "d_out", "max_rank", "target"),
    [
        ("float32", "float32", 64, 8, "rows"),
        ("bfloat16", "float32", 64, 8, "rows"),
        ("bfloat16", "bfloat16", 96, 8, "rows"),
        ("bfloat16", "bfloat16", 64, 200, "rows"),
        ("bfloat16", "bfloat16", 64, 8, "gemm"),
    ],
)
def test_rows_take_what_tensor_cores_do_not(monkeypatch, dtype, y_dtype, d_out, max_rank, target):
    monkeypatch.setattr(ffi, "require", lambda: None)
    arrays, _ = arguments(3, d_out, 64, dtype, y_dtype)
    text = str(jax.make_jaxpr(cuda_lora, static_argnums=8)(*arrays, max_rank))
    called = re.findall("target_name=lora_jax_cuda_lora_([a-z]+)", text)
    assert called == [target]


@pytest.mark.parametrize(
    ("dtype", "y_dtype", "max_rank", "why"),
    [
        ("float16", "float16", 8, "no float16"),
        ("float32", "bfloat16", 8, "no float32 to bfloat16"),
        ("float32", "float32", 9000, "rank 9000"),
    ],
)
def test_declines_what_it_cannot_serve(dtype, y_dtype, max_rank, why):
    x, y = (jax.ShapeDtypeStruct((2, 64), d) for d in (dtype, y_dtype))
    with pytest.raises(NotImplementedError, match=why):
        lora_rows.check_support(y, x, max_rank)
