"""The TPU kernel of merging, interpreted: the reference's result, bits kept, no races."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.doubles.tpu_interpreter import interpreted
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.cases import MergeCase, merge_case
from lora_jax.ops.merge import merge, pallas_tpu, reference

meaning = jax.jit(reference.merge, static_argnums=5)
on_tpu = functools.cache(lambda max_rank: interpreted(pallas_tpu.merge, max_rank=max_rank))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks of a matrix along both axes."""
    monkeypatch.setattr(pallas_tpu, "ROW_BLOCK", 128)
    monkeypatch.setattr(pallas_tpu, "COLUMN_BLOCK", 256)


def arguments(case: MergeCase) -> tuple:
    """Return the kernel's arguments: before and behind the pools' own rows are NaN."""
    own = np.asarray(case.sites)
    used = np.zeros(len(case.a_pool), bool)
    for start, _, rank in own:
        used[start : start + rank] = True
    pools = (jnp.where(used[:, None], p, jnp.nan) for p in (case.a_pool, case.b_pool))
    a_pool, b_pool = (
        jnp.pad(p, ((0, -len(p) % 64), (0, 0)), constant_values=jnp.nan) for p in pools
    )
    return case.w, a_pool, b_pool, case.sites, case.scaling


def run(case: MergeCase) -> np.ndarray:
    return on_tpu(case.max_rank)(*arguments(case))


@pytest.mark.long
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_matches_the_reference(dtype):
    """Ranks of one launch differ, and pools' rows begin anywhere."""
    case = merge_case(5, 256, 512, ranks=(16, 0, 1, 7, 24), dtype=dtype)
    want = np.asarray(meaning(*case.arrays, case.max_rank), np.float32)
    np.testing.assert_allclose(run(case), want, **TOLERANCE[dtype])


def test_a_matrix_without_rank_keeps_its_bits():
    case = merge_case(2, 128, 256, ranks=(0, 4))
    w = case.w.at[0, 0, 0].set(-0.0).at[0, 1, 1].set(jnp.nan)
    got = run(dataclasses.replace(case, w=w))
    np.testing.assert_array_equal(got[0].view(np.int32), np.asarray(w[0]).view(np.int32))


def test_rank_rows_at_the_very_end_of_the_pools():
    case = merge_case(1, 128, 128, ranks=(5,))
    own = slice(int(case.sites[0, 0]), int(case.sites[0, 0]) + 5)
    a_pool = jnp.full((16, 128), jnp.nan).at[11:].set(case.a_pool[own])
    b_pool = jnp.full((24, 128), jnp.nan).at[19:].set(case.b_pool[own])
    sites = jnp.array([[11, 19, 5]], jnp.int32)
    got = on_tpu(8)(case.w, a_pool, b_pool, sites, case.scaling)
    want = np.asarray(meaning(*case.arrays, case.max_rank))
    np.testing.assert_allclose(got, want, **TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("d_out", "max_rank", "why"),
    [(200, 8, "2 matrices of 200 x 128"), (128, 64, "pools of 24 and 24 rows; for ranks to 64")],
)
def test_declines_what_it_cannot_serve(d_out, max_rank, why):
    case = merge_case(2, d_out, 128, ranks=(8,))
    w, a_pool, b_pool, *rest = case.arrays
    pools = (jnp.pad(p, ((0, -len(p) % 8), (0, 0))) for p in (a_pool, b_pool))
    with pytest.raises(NotImplementedError, match=why):
        pallas_tpu.merge(w, *pools, *rest, max_rank, interpret=True)
    with pytest.raises(NotImplementedError, match="runs on a TPU only"):
        merge(*case.arrays, max_rank=8, implementation="pallas_tpu")


def test_declines_ranks_whose_windows_do_not_fit():
    w, pool = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 8192, 8192), (65536, 8192))
    )
    with pytest.raises(NotImplementedError, match=r"rank 60000 takes \d+ bytes of VMEM"):
        inspect.unwrap(pallas_tpu._sizes)(w, pool, pool, 60000)
