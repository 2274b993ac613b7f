"""Merge in Mosaic GPU: interpreted on a CPU, lowered for CUDA, and run where there is one.

On a GPU: JAX_PLATFORMS=cuda PYTHONPATH=src:tests:. python3 -m pytest --noconftest -m gpu FILE
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support.doubles.mosaic import interpreted
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.cases import MergeCase, merge_case
from lora_jax.ops.merge import merge, pallas_gpu
from lora_jax.ops.merge.pallas_gpu import MergeConfig, find_config

SMALL = MergeConfig(columns=128, warpgroups=2, slots=2, unit_rows=128)
MAX_RANK = 24


def oracle(case: MergeCase) -> np.ndarray:
    """Return the answer in float64."""
    w, a_pool, b_pool = (np.asarray(v, np.float64) for v in (case.w, case.a_pool, case.b_pool))
    for m, (a_row, b_row, rank) in enumerate(np.asarray(case.sites)):
        w[m] += float(case.scaling[m]) * b_pool[b_row:][:rank].T @ a_pool[a_row:][:rank]
    return w


def poisoned(case: MergeCase) -> MergeCase:
    """Return the case with NaN in every row of the pools that is no matrix's."""
    own = np.zeros(len(case.a_pool), bool)
    for start, _, rank in np.asarray(case.sites):
        own[start : start + rank] = True
    pools = (jnp.where(own[:, None], p, jnp.nan) for p in (case.a_pool, case.b_pool))
    return dataclasses.replace(case, **dict(zip(("a_pool", "b_pool"), pools, strict=True)))


def wide(array: jax.Array) -> np.ndarray:
    """Return bfloat16 as float32, which is exact."""
    return np.asarray(array.astype(jnp.float32))


@functools.cache
def interpreted_kernel(interpret: plgpu.InterpretGPUParams):
    """Return the op of the small tiles, compiled once for each shape."""
    options = {"max_rank": MAX_RANK, "config": SMALL, "interpret": interpret}
    call = jax.jit(functools.partial(pallas_gpu.merge, **options))
    return lambda case: wide(jax.block_until_ready(call(*case.arrays)))


@pytest.mark.parametrize("ranks", [(13, 0, 24), (1, 8, 16)])
def test_interpreted_matches_float64(ranks):
    """Units of one tile and of two, a last one that is short along both widths."""
    case = merge_case(3, 200, 320, ranks=ranks, dtype="bfloat16")
    with interpreted() as interpret:
        got = interpreted_kernel(interpret)(poisoned(case))
    np.testing.assert_allclose(got, oracle(case), **TOLERANCE["bfloat16"])


@pytest.mark.long
def test_interpreted_matrices_without_rank_keep_their_bits():
    case = merge_case(3, 200, 320, ranks=(0, 4, 0), dtype="bfloat16")
    w = case.w.at[0, 0, 0].set(-0.0).at[2, 1, 1].set(jnp.nan)
    with interpreted() as interpret:
        got = interpreted_kernel(interpret)(dataclasses.replace(case, w=w))
    for matrix in (0, 2):
        np.testing.assert_array_equal(got[matrix].view(np.int32), wide(w[matrix]).view(np.int32))


@pytest.mark.long
def test_interpreted_rank_rows_end_with_their_pools():
    """The copy engine fills with zeros what it would read behind a pool."""
    case = merge_case(3, 200, 320, ranks=(5, 0, 7), dtype="bfloat16")
    first = np.asarray(case.sites)[[0, 2], 0]
    sites = jnp.array([[7, 2, 5], [0, 0, 0], [0, 7, 7]], jnp.int32)

    def pool(old, places):
        new = jnp.full((17, old.shape[1]), jnp.nan, old.dtype)
        for place, start, rank in zip(places, first, (5, 7), strict=True):
            new = new.at[place : place + rank].set(old[start : start + rank])
        return new[: max(places[0] + 5, places[1] + 7)]

    a_pool, b_pool = pool(case.a_pool, (7, 0)), pool(case.b_pool, (2, 7))
    moved = dataclasses.replace(case, a_pool=a_pool, b_pool=b_pool, sites=sites)
    with interpreted() as interpret:
        got = interpreted_kernel(interpret)(moved)
    np.testing.assert_allclose(got, oracle(case), **TOLERANCE["bfloat16"])


@pytest.mark.long
@pytest.mark.parametrize("max_rank", [8, 64, 65, 128])
@pytest.mark.parametrize(("d_out", "d_in"), [(4096, 4096), (1408, 2112), (40, 64)])
def test_lowers_for_cuda_at_real_sizes(d_out, d_in, max_rank):
    bf16, i32 = jnp.bfloat16, jnp.int32
    shapes = [((32, d_out, d_in), bf16), ((99, d_in), bf16), ((99, d_out), bf16), ((32, 3), i32)]
    args = [jax.ShapeDtypeStruct(*s) for s in [*shapes, ((32,), jnp.float32)]]
    call = jax.jit(functools.partial(pallas_gpu.merge, max_rank=max_rank, interpret=False))
    text = call.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 1


def test_higher_ranks_take_narrower_tiles():
    assert find_config(64).columns > find_config(65).columns


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": jnp.float32}, "bfloat16, not float32"),
        ({"d_out": 100}, "in steps of 8 x 64, not 2 of 100 x 128"),
        ({"d_in": 96}, "in steps of 8 x 64, not 2 of 64 x 96"),
        ({"matrices": 0}, "not 0 of 64 x 128"),
        ({"max_rank": 129}, "ranks to 128, not 129"),
    ],
)
def test_declines_what_it_cannot_serve(change, why):
    sizes = {"dtype": jnp.bfloat16, "matrices": 2, "d_out": 64, "d_in": 128, "max_rank": 8}
    s = sizes | change
    pool = functools.partial(jnp.zeros, dtype=s["dtype"])
    with pytest.raises(NotImplementedError, match=why):
        pallas_gpu.merge(
            pool((s["matrices"], s["d_out"], s["d_in"])),
            pool((16, s["d_in"])),
            pool((16, s["d_out"])),
            jnp.zeros((s["matrices"], 3), jnp.int32),
            jnp.zeros(s["matrices"]),
            s["max_rank"],
            interpret=False,
        )


def test_declines_on_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    case = merge_case(2, 64, 64, dtype="bfloat16")
    with pytest.raises(NotImplementedError, match="cannot run on cpu"):
        merge(*case.arrays, max_rank=8, implementation="pallas_gpu")


@functools.partial(jax.jit, static_argnames="max_rank")
def on_gpu(*arrays, max_rank: int):
    return pallas_gpu.merge(*arrays, max_rank)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [(16, 0, 1), (24, 32, 3), (64, 33, 8), (128, 100, 64)])
@pytest.mark.parametrize(("d_out", "d_in"), [(256, 64), (296, 2112), (40, 4096), (1408, 2048)])
def test_on_a_gpu_matches_float64(d_out, d_in, ranks):
    case = merge_case(3, d_out, d_in, ranks=ranks, dtype="bfloat16")
    got = wide(on_gpu(*poisoned(case).arrays, max_rank=case.max_rank))
    np.testing.assert_allclose(got, oracle(case), **TOLERANCE["bfloat16"])
    again = wide(on_gpu(*case.arrays, max_rank=case.max_rank))
    np.testing.assert_array_equal(again, got)


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_reference_but_for_the_order_of_sums():
    """One rounding of w + scaling * sum: hardly a bit differs, none by more than one place."""
    case = merge_case(2, 1408, 2048, ranks=(64, 0), dtype="bfloat16")
    got = on_gpu(*case.arrays, max_rank=64)
    want = merge(*case.arrays, max_rank=64, implementation="reference")
    np.testing.assert_array_equal(wide(got[1]), wide(case.w[1]))
    bits = [np.asarray(v[0]).view(np.int16).astype(np.int32) for v in (got, want)]
    assert np.mean(bits[0] != bits[1]) < 1e-3
    np.testing.assert_allclose(wide(got), wide(want), rtol=2**-7, atol=1e-5)
