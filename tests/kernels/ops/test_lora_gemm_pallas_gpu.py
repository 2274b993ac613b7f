"""LoRA GEMM in Mosaic GPU: interpreted on a CPU, lowered for CUDA, and run where there is one.

On a GPU: JAX_PLATFORMS=cuda PYTHONPATH=src:tests:. python3 -m pytest --noconftest -m gpu FILE
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support.cases.kernel_calls import lora_kernel
from support.doubles.mosaic import interpreted
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops import tuning_table
from lora_jax.ops.cases import LoraCase, lora_case
from lora_jax.ops.lora_gemm import pallas_gpu
from lora_jax.ops.lora_gemm._gpu_schedule import (
    LoraGemmConfig,
    find_config,
    fitted,
    make_schedule,
    sorted_order,
)

ONE = LoraGemmConfig(rows=8, columns=64, warpgroups=1, shrink_stages=2, expand_stages=2, slots=2)
TWO = LoraGemmConfig(rows=16, columns=64, warpgroups=2, shrink_stages=3, expand_stages=3, slots=3)
WIDE = LoraGemmConfig(rows=32, columns=128, warpgroups=2, shrink_stages=4, expand_stages=4, slots=2)
# experts, ranks, popularity: borders off the grid of 8 in both pools, a rank over two tiles.
INTERPRETED = [
    (0, (16, 8, 0, 40, 1), "uniform"),
    (2, (16, 70), "skewed"),
    (0, (3,), "identical"),
    (0, (8, 4), "none"),
]
POOL_ROWS = 192
MAX_RANK = 70


def some_case(
    rows: int, d_out: int, d_in: int, experts: int, ranks: tuple[int, ...], popularity: str
) -> LoraCase:
    """Return a bfloat16 case, NaN in every row of the pools that is no adapter's."""
    options = {"ranks": ranks, "num_experts": experts, "popularity": popularity}
    case = lora_case(rows, d_out, d_in, dtype="bfloat16", **options)
    expert = case.row_to_expert
    return dataclasses.replace(
        case,
        a_pool=with_nan(case.a_pool),
        b_pool=with_nan(case.b_pool),
        row_to_expert=jnp.zeros(rows, jnp.int32) if expert is None else expert,
    )


def with_nan(pool: jax.Array) -> jax.Array:
    """Return the pool with NaN in the three rows before all adapters and in some after them."""
    rows = max(POOL_ROWS, len(pool) + -len(pool) % 8)
    pool = jnp.pad(pool, ((0, rows - len(pool)), (0, 0)), constant_values=jnp.nan)
    return pool.at[:3].set(jnp.nan)


def oracle(case: LoraCase) -> np.ndarray:
    """Return the answer in float64, of h rounded to bfloat16."""
    y = np.asarray(case.y, np.float64)
    x, a_pool, b_pool, scaling = (
        np.asarray(a, np.float64) for a in (case.x, case.a_pool, case.b_pool, case.scaling)
    )
    assert case.row_to_expert is not None
    entries, experts = np.asarray(case.entries), np.asarray(case.row_to_expert)
    for row, slot in enumerate(np.asarray(case.row_to_slot)):
        if slot >= 0:
            a_row, b_row, rank, a_stride, b_stride = entries[slot]
            a = a_pool[a_row + experts[row] * a_stride :][:rank]
            b = b_pool[b_row + experts[row] * b_stride :][:rank]
            h = (scaling[slot] * (x[row] @ a.T)).astype(ml_dtypes.bfloat16)
            y[row] += h.astype(np.float64) @ b
    return y


def wide(array: jax.Array) -> np.ndarray:
    """Return bfloat16 as float32, which is exact."""
    return np.asarray(array.astype(jnp.float32))


def check(case: LoraCase, got: jax.Array) -> None:
    """Hold the result to float64, and rows without adapter to their bits."""
    np.testing.assert_allclose(wide(got), oracle(case), **TOLERANCE["bfloat16"])
    none = np.asarray(case.row_to_slot) < 0
    np.testing.assert_array_equal(wide(got)[none], wide(case.y)[none])


@functools.cache
def interpreted_kernel(config: LoraGemmConfig, interpret: plgpu.InterpretGPUParams):
    """Return the op, compiled once for each config: that takes longer than running it."""
    options = {"max_rank": MAX_RANK, "config": config, "interpret": interpret}
    call = jax.jit(functools.partial(lora_kernel(pallas_gpu.lora_gemm), **options))
    return lambda *arrays: jax.block_until_ready(call(*arrays))


def small_case(experts: int, ranks: tuple[int, ...], popularity: str) -> LoraCase:
    """Return a case of the one size that is interpreted, with five slots."""
    case = some_case(21, 192, 192, experts, ranks, popularity)
    extra = 5 - len(ranks)
    return dataclasses.replace(
        case,
        entries=jnp.pad(case.entries, ((0, extra), (0, 0))),
        scaling=jnp.pad(case.scaling, (0, extra)),
        row_to_slot=case.row_to_slot.at[2].set(-1),
    )


@pytest.mark.parametrize("what", INTERPRETED, ids=str)
def test_interpreted_matches_float64(what):
    case = small_case(*what)
    with interpreted() as interpret:
        got = interpreted_kernel(TWO, interpret)(*case.arrays)
    check(case, got)


@pytest.mark.long
def test_interpreted_rows_have_the_same_bits_in_any_company():
    """Shuffled, in other tiles, among rows of which some lost their adapter."""
    case = small_case(0, (16, 8, 0, 40, 1), "uniform")
    order = np.random.default_rng(1).permutation(21)
    names = ("y", "x", "row_to_slot", "row_to_expert")
    moved = dataclasses.replace(case, **{name: getattr(case, name)[order] for name in names})
    moved = dataclasses.replace(moved, row_to_slot=moved.row_to_slot.at[::2].set(-1))
    with interpreted() as interpret:
        whole = interpreted_kernel(TWO, interpret)(*case.arrays)
        some = interpreted_kernel(ONE, interpret)(*moved.arrays)
    check(moved, some)
    np.testing.assert_array_equal(wide(some)[1::2], wide(whole)[order][1::2])


@pytest.mark.long
def test_interpreted_rows_have_the_same_bits_by_any_tiling():
    """Tiles of other rows, columns, warpgroups and stages; d_out is no whole number of them."""
    case = small_case(2, (16, 70), "skewed")
    with interpreted() as interpret:
        tilings = [interpreted_kernel(config, interpret) for config in (ONE, TWO, WIDE)]
        one, *others = (wide(tiling(*case.arrays)) for tiling in tilings)
    for other in others:
        np.testing.assert_array_equal(other, one)


@pytest.mark.parametrize("rows", [1, 300, 3000])
def test_rows_are_sorted_by_adapter_and_expert(rows):
    rng = np.random.default_rng(rows)
    slot, expert = rng.integers(0, 9, rows), rng.integers(0, 3, rows)
    order = sorted_order(jnp.asarray(slot, jnp.int32), jnp.asarray(expert, jnp.int32))
    np.testing.assert_array_equal(order, np.lexsort((expert, slot)))


def test_items_are_the_rows_of_one_adapter_within_one_tile():
    """Row 3 has no adapter, slot 1 no rank; the others lie at rank rows 5, 21 + 2 e and 40."""
    entries = jnp.array([[5, 6, 8, 0, 0], [0, 0, 0, 0, 0], [21, 40, 2, 2, 3]], jnp.int32)
    slot = jnp.array([2, 0, 2, -1, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0], jnp.int32)
    expert = jnp.array([1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], jnp.int32)
    schedule = jax.jit(make_schedule, static_argnums=4)(entries, jnp.arange(3.0), slot, expert, 8)
    assert schedule.num_items.tolist() == [4]
    assert schedule.order.tolist() == [1, 5, 7, 8, 9, 10, 11, 12, 13, 2, 0, 6, 3, 4, 0, 0]
    assert schedule.items[:4].tolist() == [
        [0, 0, 5, 13, 6, 14, 0, 0, 8],
        [0, 0, 5, 13, 6, 14, 8, 0, 1],
        [16, 40, 5, 7, 0, 2, 8, 1, 2],
        [16, 40, 7, 9, 3, 5, 8, 2, 4],
    ]
    assert schedule.rank.tolist() == [8] * 9 + [2] * 3 + [0] * 4


def arguments(rows: int, d_out: int, d_in: int, rank: int, slots: int) -> tuple:
    """Return shapes of a real size's arguments."""
    bf16, i32 = jnp.bfloat16, jnp.int32
    shapes = [((rows, d_out), bf16), ((rows, d_in), bf16)]
    shapes += [((slots * rank, d_in), bf16), ((slots * rank, d_out), bf16), ((slots, 5), i32)]
    shapes += [((slots,), jnp.float32), ((rows,), i32), ((rows,), i32)]
    return tuple(jax.ShapeDtypeStruct(*s) for s in shapes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "rank", "slots"),
    [(1024, 14336, 4096, 64, 512), (4096, 4096, 4096, 128, 4), (21, 768, 2048, 13, 128)],
)
def test_lowers_for_cuda_at_real_sizes(rows, d_out, d_in, rank, slots):
    call = jax.jit(
        functools.partial(lora_kernel(pallas_gpu.lora_gemm), max_rank=rank, interpret=False)
    )
    args = arguments(rows, d_out, d_in, 8 * -(-rank // 8), slots)
    text = call.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2


@pytest.mark.parametrize("max_rank", [1, 8, 64, 128])
@pytest.mark.parametrize(("rows", "slots"), [(1, 512), (1024, 512), (1024, 16), (8192, 4)])
def test_tiles_fit_the_shared_memory(rows, slots, max_rank):
    config = find_config(rows, slots, max_rank)
    # Fewer slots than two and the copies of a work would wait for the work itself.
    assert config.slots >= 2
    assert config.shrink_stages >= 3


def test_tiles_grow_with_the_rows_of_an_adapter():
    means = (1, 16, 17, 64, 65, 4096)
    assert [find_config(8 * n, 8, 16).rows for n in means] == [8, 8, 16, 16, 32, 32]


@pytest.fixture
def chosen(monkeypatch):
    """The tiles of every launch, which are not made."""
    found = []

    def launch(y, *others):
        found.append(others[-2])
        return y

    monkeypatch.setattr(pallas_gpu, "_launch", launch)
    return found


def test_the_table_of_this_device_decides_while_tracing(chosen, tmp_path, monkeypatch):
    """At the shape nearest to those that were tuned; the formula does where none is near."""
    kind = tuning_table.device_folder(jax.devices()[0].device_kind)
    tuned = fitted(LoraGemmConfig(32, columns=128, warpgroups=2), 64)
    shape = {"rows": 20, "slots": 2, "rank": 64, "d_out": 128, "d_in": 64}
    entry = {"shape": shape, "config": dataclasses.asdict(tuned)}
    (tmp_path / kind).mkdir()
    (tmp_path / kind / "lora_gemm.json").write_text(json.dumps({"entries": [entry]}))
    monkeypatch.setattr(tuning_table, "TABLES", tmp_path)
    case = some_case(30, 128, 64, 0, (8, 8), "uniform")
    for max_rank in (64, 128, 16):
        lora_kernel(pallas_gpu.lora_gemm)(*case.arrays, max_rank, interpret=False)
    tuning_table.read.cache_clear()
    # More rank rows leave shared memory for fewer works of the expand.
    larger = dataclasses.replace(tuned, slots=tuned.slots - 1)
    assert chosen == [tuned, larger, find_config(30, 2, 16)]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": jnp.float32}, "bfloat16, not float32"),
        ({"d_out": 100}, r"steps of 64, not \(128, 100\)"),
        ({"d_in": 72}, r"steps of 64, not \(72, 64\)"),
        ({"pool": 20}, r"steps of 8 rows, not \(20, 20\)"),
        ({"max_rank": 129}, "ranks to 128, not 129"),
        ({"rows": 0}, "at least one row, not 0"),
    ],
)
def test_declines_what_it_cannot_serve(change, why):
    sizes = {"dtype": jnp.bfloat16, "rows": 4, "d_out": 64, "d_in": 128, "pool": 16, "max_rank": 8}
    s = sizes | change
    pair, ints = (
        functools.partial(jnp.zeros, dtype=s["dtype"]),
        functools.partial(jnp.zeros, dtype="i4"),
    )
    with pytest.raises(NotImplementedError, match=why):
        lora_kernel(pallas_gpu.lora_gemm)(
            pair((s["rows"], s["d_out"])),
            pair((s["rows"], s["d_in"])),
            pair((s["pool"], s["d_in"])),
            pair((s["pool"], s["d_out"])),
            ints((1, 5)),
            jnp.zeros(1),
            ints(s["rows"]),
            ints(s["rows"]),
            s["max_rank"],
            interpret=False,
        )


def test_declines_on_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    case = some_case(4, 64, 64, 0, (8,), "identical")
    with pytest.raises(NotImplementedError, match="cannot run on cpu"):
        lora_kernel(pallas_gpu.lora_gemm)(*case.arrays, case.max_rank)


# rows, d_out, d_in, experts, ranks, popularity
REAL = [
    (1, 64, 64, 0, (8,), "identical"),
    (1024, 14336, 4096, 0, (64,) * 64, "zipf"),
    (300, 4096, 14336, 0, (8, 16, 0, 64, 128, 1, 24, 13), "uniform"),
    (512, 768, 2048, 16, (32, 16, 8, 5), "uniform"),
    (4096, 4096, 4096, 0, (64, 128), "uniform"),
    (1024, 1408, 2048, 0, (64,), "identical"),
    (64, 2048, 2880, 0, (64, 32) * 16, "distinct"),
]


@functools.partial(jax.jit, static_argnames="max_rank")
def on_gpu(*arrays, max_rank: int):
    return lora_kernel(pallas_gpu.lora_gemm)(*arrays, max_rank)


@pytest.mark.gpu
@pytest.mark.parametrize("what", REAL, ids=lambda w: f"{w[:4]}-{len(w[4])}-{w[5]}")
def test_on_a_gpu_matches_float64(what):
    case = some_case(*what)
    if what[0] > 10:
        case = dataclasses.replace(case, row_to_slot=case.row_to_slot.at[::7].set(-1))
    got = on_gpu(*case.arrays, max_rank=case.max_rank)
    check(case, got)
    again = on_gpu(*case.arrays, max_rank=case.max_rank)
    np.testing.assert_array_equal(wide(again), wide(got))


@pytest.mark.gpu
def test_on_a_gpu_a_row_has_the_same_bits_in_any_company():
    case = some_case(1024, 2048, 4096, 0, (64, 16, 128, 8), "skewed")
    whole = wide(on_gpu(*case.arrays, max_rank=128))
    for rows in (np.array([5]), np.arange(100, 164), np.random.default_rng(3).permutation(1024)):
        names = ("y", "x", "row_to_slot", "row_to_expert")
        some = dataclasses.replace(case, **{name: getattr(case, name)[rows] for name in names})
        np.testing.assert_array_equal(wide(on_gpu(*some.arrays, max_rank=128)), whole[rows])
