"""Segments with many rows on Hopper: against float64, and the bits that few rows have."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.cases.kernel_calls import lora_kernel
from support.oracles.tolerance import TOLERANCE

from cuda_backend import ffi, lora_tiles, reroute
from cuda_backend import lora_gemm as cuda
from lora_jax.ops.cases import LoraCase, lora_case


@lora_kernel
def cuda_lora(y, batch):
    """The kernel of one linear map."""
    return cuda.lora_gemm((y,), batch)[0]


def some_case(rows: int, d_out: int, d_in: int, **options) -> LoraCase:
    case = lora_case(rows, d_out, d_in, dtype="bfloat16", **options)
    return dataclasses.replace(case, row_to_expert=jnp.zeros(rows, jnp.int32))


@functools.partial(jax.jit, static_argnames="max_rank")
def kernel(*arrays, max_rank: int):
    return cuda_lora(*arrays, max_rank)


def run(case: LoraCase) -> np.ndarray:
    """Return the kernel's result as float32, which is exact."""
    return np.asarray(kernel(*case.arrays, max_rank=case.max_rank).astype(jnp.float32))


def oracle(case: LoraCase) -> np.ndarray:
    """Return the answer in float64 but for h, which is rounded to bfloat16."""
    y, x, a_pool, b_pool, scaling = (
        np.asarray(a, np.float64) for a in (case.y, case.x, case.a_pool, case.b_pool, case.scaling)
    )
    slots = np.asarray(case.row_to_slot)
    for slot, (a_row, b_row, rank, _, _) in enumerate(np.asarray(case.entries)):
        own = slots == slot
        h = scaling[slot] * (x[own] @ a_pool[a_row : a_row + rank].T)
        y[own] += h.astype(ml_dtypes.bfloat16).astype(np.float64) @ b_pool[b_row : b_row + rank]
    return y


@pytest.mark.parametrize(
    ("rows", "slots", "rank", "shrinks", "expands"),
    [
        (255, 1, 64, False, False),
        (1023, 512, 64, False, True),
        (1024, 512, 64, True, True),
        (256, 4, 128, True, True),
        (256, 5, 65, False, True),
        (1024, 512, 128, False, True),
        (2048, 512, 128, True, True),
    ],
)
def test_the_shape_of_a_call_says_whether_it_may_have_tiles(
    monkeypatch, rows, slots, rank, shrinks, expands
):
    """A step's items, made once for all its maps, have them too."""
    monkeypatch.setattr(ffi, "require", lambda: None)

    def may_have(row_to_slot):
        items = cuda.row_items(row_to_slot, jnp.zeros_like(row_to_slot), slots, rank)
        of_step = reroute.adapter_items(row_to_slot, slots, rank)
        steps_tiles = () if of_step.tiles is None else of_step.tiles.tiles
        return items.arrays[3], items.tiled_arrays[3], steps_tiles, of_step.items

    owners = jax.ShapeDtypeStruct((rows,), jnp.int32)
    pair, expand, steps_tiles, all_items = jax.eval_shape(may_have, owners)
    assert (len(pair) > 0, len(expand) > 0) == (shrinks, expands)
    assert steps_tiles == (pair if shrinks else ())
    assert all_items.shape == (rows, 4)


@functools.partial(jax.jit, static_argnames="slots")
def tiled_rows(row_to_slot: jax.Array, slots: int = 8) -> jax.Array:
    """Return how many rows are in tiles."""
    tiles = cuda.row_items(row_to_slot, jnp.zeros_like(row_to_slot), slots).tiles
    assert tiles is not None
    live = jnp.arange(len(tiles.tiles)) < tiles.cut[0]
    return jnp.sum(jnp.where(live, tiles.tiles[:, 3], 0))


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [8, 24, 64, 128])
@pytest.mark.parametrize("popularity", ["identical", "uniform", "zipf"])
def test_many_rows_match_float64_and_few_rows_bits(rank, popularity):
    case = some_case(2600, 1408, 832, ranks=(rank, rank - 3, 1), popularity=popularity)
    got = run(case)
    np.testing.assert_allclose(got, oracle(case), **TOLERANCE["bfloat16"])
    for rows in (1, 60, lora_tiles.FEWEST_ROWS - 1, lora_tiles.FEWEST_ROWS):
        some = np.random.default_rng(rows).permutation(2600)[:rows]
        names = ("y", "x", "row_to_slot", "row_to_expert")
        few = dataclasses.replace(case, **{n: getattr(case, n)[some] for n in names})
        np.testing.assert_array_equal(run(few), got[some])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("counts", "tiled"),
    [
        ((2000, 23, 24, 300), 2347),  # few segments: all of them
        ((2000, 23, 24, *[1] * 60), 2024),  # a segment of 23 stays
        ((300, *[20] * 5, 1, 1), 0),  # too few of all rows
        ((400,), 400),
        ((7900,), 7900),
    ],
)
def test_only_many_rows_become_tiles(counts, tiled):
    slots = np.repeat([*range(len(counts)), -1], [*counts, 150]).astype(np.int32)
    slots = np.random.default_rng(0).permutation(slots)
    assert int(tiled_rows(jnp.asarray(slots), 64)) == tiled


@pytest.mark.gpu
@pytest.mark.parametrize("popularity", ["identical", "uniform"])
def test_many_rows_have_the_same_bits_each_time(popularity):
    """Stages of A come and go while other kernels begin: what came late would differ."""
    case = some_case(2100, 2048, 4096, ranks=(64, 64, 40), popularity=popularity)
    want = run(case)
    for _ in range(20):
        np.testing.assert_array_equal(run(case), want)


@functools.partial(jax.jit, static_argnames=("modules", "max_rank"))
def several(y, x, a_pool, b_pool, entries, scaling, *owners, modules: int, max_rank: int):
    maps = [(y, entries, scaling * (number + 1)) for number in range(modules)]
    return cuda.lora_gemms(maps, x, a_pool, b_pool, *owners, max_rank)


@pytest.mark.gpu
@pytest.mark.parametrize("modules", [2, 3])
@pytest.mark.parametrize("rows", [300, 2600])
def test_maps_of_the_same_rows_have_the_bits_of_each_alone(rows, modules):
    """In fewer tiles than clusters, of which some begin with the second map."""
    case = some_case(rows, 1024, 832, ranks=(64,), popularity="identical")
    together = several(*case.arrays, modules=modules, max_rank=case.max_rank)
    for number, got in enumerate(together):
        alone = dataclasses.replace(case, scaling=case.scaling * (number + 1))
        np.testing.assert_array_equal(np.asarray(got.astype(jnp.float32)), run(alone))


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [17, 64, 100])
@pytest.mark.parametrize(
    "counts", [(1000,), (500, 260, 130, 60, 30, 16, 9, 4, 1), (900, *[1] * 80), (2500, 500, 40)]
)
def test_a_shrink_alone_has_the_bits_of_items_each_time(rank, counts):
    case = some_case(sum(counts) + 7, 64, 4096, ranks=(rank,) * len(counts))
    slots = np.repeat([*range(len(counts)), -1], [*counts, 7]).astype(np.int32)
    case = dataclasses.replace(
        case, row_to_slot=jnp.asarray(np.random.default_rng(1).permutation(slots))
    )

    @functools.partial(jax.jit, static_argnames="tiled")
    def shrink(x, a_pool, entries, scaling, row_to_slot, tiled):
        items = cuda.row_items(row_to_slot, jnp.zeros_like(row_to_slot), len(counts), rank)
        items = items if tiled else dataclasses.replace(items, tiles=None)
        h = cuda.lora_shrink(x, a_pool, entries, scaling, items, rank)
        return h[: sum(counts)].astype(jnp.float32)

    arrays = (case.x, case.a_pool, case.entries, case.scaling, case.row_to_slot)
    want = np.asarray(shrink(*arrays, tiled=False))
    assert np.any(want)
    for _ in range(40):
        np.testing.assert_array_equal(np.asarray(shrink(*arrays, tiled=True)), want)


@pytest.mark.gpu
def test_items_made_once_for_many_maps_hold_the_rows_in_tiles():
    case = some_case(2600, 512, 640, ranks=(64, 8), popularity="uniform")

    @jax.jit
    def by_step(*arrays):
        items = reroute.adapter_items(arrays[6], 2, 64)
        return cuda_lora(*arrays, 64, items).astype(jnp.float32)

    assert int(tiled_rows(case.row_to_slot, 2)) == 2600
    np.testing.assert_array_equal(np.asarray(by_step(*case.arrays)), run(case))


@pytest.mark.gpu
def test_shrink_then_expand_is_the_pair():
    case = some_case(3500, 512, 640, ranks=(64, 0, 16), popularity="skewed")

    @jax.jit
    def both(y, x, a_pool, b_pool, entries, scaling, row_to_slot, row_to_expert):
        items = cuda.row_items(row_to_slot, row_to_expert, 3)
        h = cuda.lora_shrink(x, a_pool, entries, scaling, items, 64)
        return cuda.lora_expand(y, h, b_pool, entries, scaling, items).astype(jnp.float32)

    np.testing.assert_array_equal(np.asarray(both(*case.arrays)), run(case))
