"""Merge on Hopper: against float64 at ranks, edges and places; what it declines."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.oracles.tolerance import TOLERANCE

from cuda_backend import merge as cuda
from lora_jax.ops.cases import MergeCase, merge_case


@functools.partial(jax.jit, static_argnames="max_rank")
def kernel(*arrays, max_rank: int):
    return cuda.merge(*arrays, max_rank)


def run(case: MergeCase) -> np.ndarray:
    """Return the kernel's result as float32, which is exact."""
    return np.asarray(kernel(*case.arrays, max_rank=case.max_rank).astype(jnp.float32))


def oracle(case: MergeCase) -> np.ndarray:
    """Return the answer in float64."""
    w, a_pool, b_pool = (np.asarray(v, np.float64) for v in (case.w, case.a_pool, case.b_pool))
    for m, (a_row, b_row, rank) in enumerate(np.asarray(case.sites)):
        w[m] += float(case.scaling[m]) * b_pool[b_row:][:rank].T @ a_pool[a_row:][:rank]
    return w


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(16, 0, 1), (24, 32, 3), (64, 33, 8), (128, 100, 64)])
@pytest.mark.parametrize(("d_out", "d_in"), [(256, 64), (296, 2112), (40, 4096), (1408, 2048)])
def test_matches_float64(d_out, d_in, ranks):
    case = merge_case(3, d_out, d_in, ranks=ranks, dtype="bfloat16")
    np.testing.assert_allclose(run(case), oracle(case), **TOLERANCE["bfloat16"])


@pytest.mark.gpu
def test_a_matrix_without_rank_keeps_its_bits_and_foreign_rows_do_not_matter():
    case = merge_case(2, 256, 128, ranks=(0, 5), dtype="bfloat16")
    nan = jnp.asarray(jnp.nan, jnp.bfloat16)
    place = jnp.arange(len(case.a_pool)) - case.sites[1, 0]
    own = ((place >= 0) & (place < 5))[:, None]
    poisoned = dataclasses.replace(
        case,
        w=case.w.at[0, 1, 1].set(nan),
        a_pool=jnp.where(own, case.a_pool, nan),
        b_pool=jnp.where(own, case.b_pool, nan),
        max_rank=64,
    )
    got = run(poisoned)
    np.testing.assert_array_equal(got[0], np.asarray(poisoned.w[0].astype(jnp.float32)))
    np.testing.assert_array_equal(got[1], run(case)[1])


@pytest.mark.gpu
def test_unmerging_ends_within_a_rounding_of_the_old_weights():
    case = merge_case(2, 512, 512, ranks=(64,), dtype="bfloat16")
    merged = dataclasses.replace(case, w=jnp.asarray(run(case)).astype(jnp.bfloat16))
    back = run(dataclasses.replace(merged, scaling=-case.scaling))
    np.testing.assert_allclose(back, np.asarray(case.w, np.float32), **TOLERANCE["bfloat16"])


@pytest.mark.parametrize(
    ("dtype", "d_out", "d_in", "max_rank", "why"),
    [
        ("float32", 8, 64, 8, "bfloat16, not float32"),
        ("bfloat16", 8, 100, 8, "d_in in steps of 64, not 100"),
        ("bfloat16", 60, 64, 8, "d_out in steps of 8, not 60"),
        ("bfloat16", 8, 64, 129, "ranks to 128, not 129"),
    ],
)
def test_declines_what_it_cannot_serve(dtype, d_out, d_in, max_rank, why):
    cuda.check_support(jnp.dtype("bfloat16"), 8, 64, 8)
    with pytest.raises(NotImplementedError, match=why):
        cuda.check_support(jnp.dtype(dtype), d_out, d_in, max_rank)
