"""Grouped LoRA of one dense module: shrink, expand, and the pair.

The floor is the fewest bytes of the op (each weight of each adapter in the batch once, x read, y
written) over the copy bandwidth of the same run. Peers' times are the best measured on an H200 the
same way; bars are what this project set itself.
"""

import dataclasses
import functools
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.timing import random, repeats_for, time_us
from cuda_backend import lora_gemm
from lora_jax.ops.cases import popular

SETS = 4  # of arrays: more than L2 holds in all points that have a bar


@dataclasses.dataclass(frozen=True)
class Point:
    """One row of the table."""

    name: str
    op: str  # pair, shrink, expand
    rows: int
    d_out: int
    rank: int = 64
    slots: int = 512
    popularity: str = "zipf"
    d_in: int = 4096
    adds: bool = True  # to y; else the result is the sum alone
    peer_us: float | None = None
    bar_us: float | None = None


POINTS = (
    Point("1024 tokens, Zipf 1.2", "pair", 1024, 14336, peer_us=182.6, bar_us=138),
    Point("1024 tokens, Zipf 1.2", "shrink", 1024, 14336, peer_us=46.7, bar_us=31),
    Point("1024 tokens, Zipf 1.2", "expand", 1024, 14336, peer_us=144.5, bar_us=108),
    Point(
        "1024 tokens, Zipf 1.2, without y",
        "expand",
        1024,
        14336,
        adds=False,
        peer_us=144.5,
        bar_us=108,
    ),
    Point("64 tokens, Zipf 1.2", "pair", 64, 14336, peer_us=33.6, bar_us=26),
    Point("256 tokens, Zipf 1.2", "pair", 256, 14336, peer_us=80.8, bar_us=60),
    Point(
        "1024 tokens, one adapter",
        "expand",
        1024,
        14336,
        popularity="identical",
        peer_us=27.8,
        bar_us=16,
    ),
    Point(
        "1024 tokens, one adapter, without y",
        "expand",
        1024,
        14336,
        popularity="identical",
        adds=False,
        peer_us=27.8,
        bar_us=16,
    ),
    Point(
        "1024 tokens, 1024 adapters",
        "expand",
        1024,
        14336,
        slots=1024,
        popularity="distinct",
        peer_us=498,
        bar_us=480,
    ),
    Point(
        "prefill, 4096 tokens, 4 adapters",
        "pair",
        4096,
        4096,
        slots=4,
        popularity="uniform",
        peer_us=55.0,
        bar_us=30,
    ),
    Point(
        "prefill, 4096 tokens, 4 adapters, without y",
        "pair",
        4096,
        4096,
        slots=4,
        popularity="uniform",
        adds=False,
        peer_us=55.0,
        bar_us=30,
    ),
    *(
        Point(
            f"prefill, {rows} tokens, 4 adapters", "pair", rows, 4096, slots=4, popularity="uniform"
        )
        for rows in (512, 1024, 2048, 8192)
    ),
    Point("1024 tokens, rank 8", "pair", 1024, 14336, rank=8),
    Point("1024 tokens, rank 16", "pair", 1024, 14336, rank=16),
    Point("1024 tokens, rank 32", "pair", 1024, 14336, rank=32),
    Point("1024 tokens, rank 128", "pair", 1024, 14336, rank=128),
    Point("1 token", "pair", 1, 14336),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """One set of a point's arrays, without y."""

    x: jax.Array
    a_pool: jax.Array
    b_pool: jax.Array
    entries: jax.Array
    scaling: jax.Array
    items: lora_gemm.RowItems
    h: jax.Array


def make_inputs(point: Point, seed: int) -> tuple[Inputs, np.ndarray]:
    """Return one set of arrays and row_to_slot; slot s owns rows s * rank of both pools."""
    rng = np.random.default_rng(seed)
    row_to_slot = popular(point.popularity, point.rows, point.slots, rng)
    entries = np.zeros((point.slots, 5), np.int32)
    entries[:, 0] = entries[:, 1] = np.arange(point.slots) * point.rank
    entries[:, 2] = point.rank
    pool_rows = point.slots * point.rank
    make_items = jax.jit(lora_gemm.row_items, static_argnums=(2, 3))
    slots, experts = jnp.asarray(row_to_slot), jnp.zeros(point.rows, jnp.int32)
    inputs = Inputs(
        x=random(4 * seed, (point.rows, point.d_in), 1.0),
        a_pool=random(4 * seed + 1, (pool_rows, point.d_in), point.d_in**-0.5),
        b_pool=random(4 * seed + 2, (pool_rows, point.d_out), point.rank**-0.5),
        entries=jnp.asarray(entries),
        scaling=jnp.full((point.slots,), 0.5, jnp.float32),
        items=make_items(slots, experts, point.slots, point.rank),
        h=jnp.zeros((0, 0), jnp.bfloat16),
    )
    h = lora_gemm.lora_shrink(
        inputs.x, inputs.a_pool, inputs.entries, inputs.scaling, inputs.items, point.rank
    )
    return dataclasses.replace(inputs, h=h), row_to_slot


def apply(point: Point, y: jax.Array, s: Inputs) -> jax.Array:
    """Return what the op writes: the new y, or h."""
    table = (s.entries, s.scaling, s.items)
    if point.op == "shrink":
        return shrink(s)
    if not point.adds:
        return expand_alone(s) if point.op == "expand" else pair_alone(point, s)
    if point.op == "expand":
        return lora_gemm.lora_expand(y, s.h, s.b_pool, *table)
    return lora_gemm.lora_pair(y, s.x, s.a_pool, s.b_pool, *table, point.rank)


def shrink(s: Inputs) -> jax.Array:
    """Return what lora_shrink does; the side effect keeps XLA from sharing equal calls."""
    shape = jax.ShapeDtypeStruct(s.h.shape, s.h.dtype)
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_shrink", shape, has_side_effect=True)
    return call(s.x, s.a_pool, s.entries, s.scaling, *s.items.arrays)


def expand_alone(s: Inputs) -> jax.Array:
    """Return what lora_expand does without y; see shrink for the side effect."""
    shapes = [jax.ShapeDtypeStruct((len(s.h), s.b_pool.shape[1]), s.h.dtype)]
    shapes += [jax.ShapeDtypeStruct((1,), jnp.int32)]
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_expand", shapes, has_side_effect=True)
    arrays = (s.h, s.b_pool, s.entries, s.scaling, *s.items.arrays)
    return call(*arrays, accumulate=False)[0]


def pair_alone(point: Point, s: Inputs) -> jax.Array:
    """Return what lora_pair does without y; see shrink for the side effect."""
    work = jax.ShapeDtypeStruct((s.h.size // 2 + 1,), jnp.int32)
    shapes = [work, jax.ShapeDtypeStruct((point.rows, point.d_out), s.x.dtype)]
    call = jax.ffi.ffi_call("lora_jax_cuda_lora_gemm", shapes, has_side_effect=True)
    arrays = (s.x, s.a_pool, s.b_pool, *s.items.arrays, s.entries, s.scaling)
    sites, max_rank = np.zeros(1, np.int64), np.int64(point.rank)
    return call(*arrays, sites=sites, max_rank=max_rank, accumulate=False)[1]


def bytes_moved(point: Point, distinct: float) -> float:
    """Return the fewest bytes: weights of the adapters in the batch, x read, y written."""
    shrink = 2.0 * point.d_in * (distinct * point.rank + point.rows)
    expand = 2.0 * point.d_out * (distinct * point.rank + point.rows)
    return {"shrink": shrink, "expand": expand, "pair": shrink + expand}[point.op]


def error(point: Point, y: jax.Array, inputs: Inputs, row_to_slot: np.ndarray) -> float:
    """Return the largest relative error of some rows against float64."""
    got = np.asarray(jax.jit(functools.partial(apply, point))(y, inputs).astype(jnp.float32))
    order = list(np.asarray(inputs.items.order))
    worst = 0.0
    for row in np.linspace(0, point.rows - 1, 5).astype(int):
        own = slice(row_to_slot[row] * point.rank, (row_to_slot[row] + 1) * point.rank)
        x, a, b = (
            np.asarray(v, np.float64)
            for v in (inputs.x[row], inputs.a_pool[own], inputs.b_pool[own])
        )
        want, place = 0.5 * (a @ x), row
        if point.op == "shrink":
            place = order.index(row)
        else:
            want = point.adds * np.asarray(y[row], np.float64) + want @ b
        mine = got[place][: len(want)].astype(np.float64)
        worst = max(worst, float(np.linalg.norm(mine - want) / np.linalg.norm(want)))
    return worst


def measure(point: Point, bandwidth: float) -> dict:
    """Return the point's row of the table."""
    sets = [make_inputs(point, seed + 1) for seed in range(SETS)]
    distinct = statistics.mean(len(set(slots)) for _, slots in sets)
    floor_us = bytes_moved(point, distinct) / bandwidth * 1e6
    ys = [random(99 + i, (point.rows, point.d_out), 1.0) for i in range(SETS)]
    worst = error(point, ys[0], *sets[0])
    repeats = repeats_for(floor_us, SETS)
    inputs = [s for s, _ in sets]
    outs = [s.h for s in inputs] if point.op == "shrink" else ys

    @functools.partial(jax.jit, donate_argnums=0)
    def program(outs, inputs):
        for i in range(repeats * SETS):
            outs[i % SETS] = apply(point, outs[i % SETS], inputs[i % SETS])
        return outs

    took = time_us(lambda outs: program(outs, inputs), [o.copy() for o in outs], repeats * SETS)
    return {
        **dataclasses.asdict(point),
        "name": f"{point.op} {point.d_in} -> {point.d_out}, {point.name}, rank {point.rank}",
        "distinct": distinct,
        "us": took,
        "floor_us": floor_us,
        "error": worst,
    }


def rows(bandwidth: float, dense: float) -> Iterator[dict]:
    """Yield the rows of the table."""
    for point in POINTS:
        yield measure(point, bandwidth)


def metadata_us(rows: int) -> float:
    """Return microseconds of sorting `rows` rows of 512 slots into items."""
    slots = jnp.asarray(popular("zipf", rows, 512, np.random.default_rng(0)))
    program = jax.jit(lambda s: _chain_items(s, 50), donate_argnums=0)
    return time_us(program, slots, 50)


def _chain_items(slots: jax.Array, times: int) -> jax.Array:
    """Sort `times` times, each time the order of the last (any numbers do as slots)."""
    for _ in range(times):
        slots = lora_gemm.row_items(slots, jnp.zeros_like(slots), 512).order
    return slots
