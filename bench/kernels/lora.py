"""Grouped LoRA of one dense module: shrink, expand, and the pair.

The floor is the fewest bytes of the op (each weight of each adapter in the batch once, x read, y
written) over the copy bandwidth of the same run. Peers' times are the best measured on an H200 the
same way, cold, of those that add to y where we do, and of those that do not where we do not; bars
are what this project set itself.
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics
from concurrent.futures import Future
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.jobs import Job, Machine
from bench.kernels.numbers import Numbers
from bench.kernels.timing import cold_sets, repeats_for, time_us
from cuda_backend import lora_gemm
from lora_jax.ops.cases import popular

# Of arrays, at least and at most: as many as keep L2 cold. A program's arguments cost the host 5 us
# each, small ops the device no more: of 128 sets the host is timed, and of 8 the least points stay
# warm, those of a few rows of one adapter.
SETS = (4, 8)
SCALING = 0.5
CHECKED = 5  # rows of a result, against float64
MOST_POOL_ROWS = 1 << 17  # sets share blocks of adapters beyond that


@dataclasses.dataclass(frozen=True)
class Point:
    """One row of the table."""

    what: str
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

    @property
    def name(self) -> str:
        """The row's name in the table."""
        return f"{self.op} {self.d_in} -> {self.d_out}, {self.what}, rank {self.rank}"

    @property
    def cell(self) -> tuple:
        """Inputs that several points share."""
        return self.rows, self.d_in, self.d_out, self.rank, self.slots, self.popularity

    @functools.cached_property
    def owners(self) -> list[np.ndarray]:
        """Each set's adapter of each row: as many sets as keep even the shrink's bytes cold."""
        rng = np.random.default_rng(1)
        draw = functools.partial(popular, self.popularity, self.rows, self.slots, rng)
        first = draw()
        shrink = dataclasses.replace(self, op="shrink")
        sets = cold_sets(bytes_moved(shrink, [first]), *SETS)
        return [first, *(draw() for _ in range(sets - 1))]


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
        peer_us=622.8,
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
        peer_us=601,
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
        bar_us=30,
    ),
    *(
        Point(
            f"prefill, {rows} tokens, 4 adapters", "pair", rows, 4096, slots=4, popularity="uniform"
        )
        for rows in (512, 1024, 2048, 8192)
    ),
    Point("1024 tokens, Zipf 1.2", "pair", 1024, 14336, rank=8),
    Point("1024 tokens, Zipf 1.2", "pair", 1024, 14336, rank=16),
    Point("1024 tokens, Zipf 1.2", "pair", 1024, 14336, rank=32),
    Point("1024 tokens, Zipf 1.2", "pair", 1024, 14336, rank=128),
    Point("1 token", "pair", 1, 14336),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """One set of a point's arrays, without y and weights."""

    x: jax.Array
    entries: jax.Array
    scaling: jax.Array
    items: lora_gemm.CudaWorkList
    h: jax.Array


Pools = tuple[jax.Array, jax.Array]  # of all sets and slots: A [pool rows, d_in], B [.., d_out]


class Cell:
    """The inputs of the points of one cell, made when the first of them asks.

    Each slot owns one block of `rank` rows of both pools; other sets' slots own other blocks.
    """

    def __init__(self, point: Point, pools: "PoolsBySize", machine: Machine):
        self.point, self.pools = point, pools
        self.owners = point.owners
        self.sets = len(self.owners)
        self.xs = [Numbers((point.rows, point.d_in), 4 * i + 1) for i in range(self.sets)]
        self.ys = [Numbers((point.rows, point.d_out), 4 * i + 2) for i in range(self.sets)]
        rows = jax.ShapeDtypeStruct(self.xs[0].shape, jnp.bfloat16)
        arguments = ([rows] * self.sets, pools.shapes(point)[0])
        self.shapes = jax.eval_shape(self._make, *arguments)
        self.made = machine.compile(self._make, *arguments)

    def blocks(self, i: int) -> np.ndarray:
        """Return which block of the pools each slot of set i owns."""
        blocks = self.pools.rows(self.point) // self.point.rank
        return (np.arange(self.point.slots) + i * max(1, blocks // self.sets)) % blocks

    def _make(self, xs: list[jax.Array], a_pool: jax.Array) -> list[Inputs]:
        point, sets = self.point, []
        scaling = jnp.full((point.slots,), SCALING, jnp.float32)
        for i, x in enumerate(xs):
            entries = np.zeros((point.slots, 5), np.int32)
            entries[:, 0] = entries[:, 1] = self.blocks(i) * point.rank
            entries[:, 2] = point.rank
            owners = jnp.asarray(self.owners[i])
            items = lora_gemm.row_items(owners, jnp.zeros_like(owners), point.slots, point.rank)
            table = (jnp.asarray(entries), scaling, items)
            h = lora_gemm.lora_shrink(x, a_pool, *table, point.rank)
            sets.append(Inputs(x, *table, h))
        return sets

    @functools.cached_property
    def inputs(self) -> list[Inputs]:
        """The arrays of all sets on the device."""
        xs = [x.on_device() for x in self.xs]
        return self.made.result()(xs, self.pools.arrays(self.point)[0])


class PoolsBySize:
    """Weights that all cells of a size share; the largest rank and number of slots size them."""

    def __init__(self, points: list[Point]):
        self._rows: dict[tuple[int, int], int] = {}
        for p in points:
            rows = max(p.rank * p.slots, min(len(p.owners) * p.rank * p.slots, MOST_POOL_ROWS))
            self._rows[p.d_in, p.d_out] = max(rows, self._rows.get((p.d_in, p.d_out), 0))
        self._arrays: dict[tuple[int, int], Pools] = {}

    def rows(self, point: Point) -> int:
        """Return the pools' rows."""
        return self._rows[point.d_in, point.d_out]

    def numbers(self, point: Point) -> tuple[Numbers, Numbers]:
        """Return the pools' numbers; those of B are as small as at rank 64 whatever the rank."""
        rows, scale = self.rows(point), (point.d_in**-0.5, 64**-0.5)
        widths = (point.d_in, point.d_out)
        a, b = (Numbers((rows, w), 90 + i, scale[i]) for i, w in enumerate(widths))
        return a, b

    def shapes(self, point: Point) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return what stands for the pools in a program that is compiled."""
        return tuple(jax.ShapeDtypeStruct(n.shape, jnp.bfloat16) for n in self.numbers(point))

    def arrays(self, point: Point) -> Pools:
        """Return the pools, made at the first call."""
        key = point.d_in, point.d_out
        if key not in self._arrays:
            a, b = self.numbers(point)
            self._arrays[key] = a.on_device(), b.on_device()
        return self._arrays[key]


def apply(point: Point, y: jax.Array, s: Inputs, pools: Pools) -> jax.Array:
    """Return what the op writes: the new y, or h."""
    table, (a_pool, b_pool) = (s.entries, s.scaling, s.items), pools
    if point.op == "shrink":
        return lora_gemm.lora_shrink(s.x, a_pool, *table, point.rank)
    old = y if point.adds else None
    if point.op == "expand":
        return lora_gemm.lora_expand(old, s.h, b_pool, *table)
    return lora_gemm.lora_pair(old, s.x, a_pool, b_pool, *table, point.rank)


def all_run() -> contextlib.AbstractContextManager:
    """Let no call that is traced within be shared with an equal one, or left out as unused."""
    call = functools.partial(jax.ffi.ffi_call, has_side_effect=True)
    return mock.patch.object(jax.ffi, "ffi_call", call)


def asked_for(owners: list[np.ndarray]) -> float:
    """Return how many adapters the rows of a set ask for."""
    return statistics.mean(len(np.unique(of[of >= 0])) for of in owners)


def bytes_moved(point: Point, owners: list[np.ndarray]) -> float:
    """Return the fewest bytes: weights of the adapters in a batch, x read, y written.

    Rows that ask for no adapter take none.
    """
    rows = asked_for(owners) * point.rank + statistics.mean(int((of >= 0).sum()) for of in owners)
    shrink, expand = 2.0 * point.d_in * rows, 2.0 * point.d_out * rows
    return {"shrink": shrink, "expand": expand, "pair": shrink + expand}[point.op]


def error(point: Point, cell: Cell, got: np.ndarray) -> float:
    """Return the largest relative error of the checked rows of set 0 against float64."""
    worst = 0.0
    for row, mine in zip(checked_rows(point), got, strict=True):
        want = wanted(point, cell, row)
        mine = mine[: len(want)].astype(np.float64)
        worst = max(worst, float(np.linalg.norm(mine - want) / np.linalg.norm(want)))
    return worst


def wanted(point: Point, cell: Cell, row: int) -> np.ndarray:
    """Return a row of set 0's result, in float64."""
    slot, old = cell.owners[0][row], 0.0
    if point.op != "shrink":
        old = point.adds * cell.ys[0].rows([row])[0]
        if slot < 0:
            return old
    rank_rows = cell.blocks(0)[slot] * point.rank + np.arange(point.rank)
    a, b = (n.rows(rank_rows) for n in cell.pools.numbers(point))
    h = SCALING * (a @ cell.xs[0].rows([row])[0])
    return h if point.op == "shrink" else old + h @ b


def checked_rows(point: Point) -> np.ndarray:
    """Return the rows of a result that are held against float64."""
    return np.linspace(0, point.rows - 1, CHECKED).astype(int)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A point with its inputs and programs."""

    point: Point
    cell: Cell
    floor_us: float
    repeats: int
    check: Future
    chain: Future

    def measure(self) -> dict[str, Any]:
        """Return the point's row of the table."""
        point, cell = self.point, self.cell
        inputs, pools = cell.inputs, cell.pools.arrays(point)
        rows = checked_rows(point)
        if point.op == "shrink":  # h is in the order of the items
            rows = np.argsort(np.asarray(inputs[0].items.order))[rows]
        ys = [y.on_device() for y in cell.ys]
        got = np.asarray(self.check.result()(ys[0], inputs[0], pools, rows.astype(np.int32)))
        outs = [s.h.copy() for s in inputs] if point.op == "shrink" else ys
        program = self.chain.result()
        took = time_us(lambda outs: program(outs, inputs, pools), outs, self.repeats * cell.sets)
        return {
            **{k: v for k, v in dataclasses.asdict(point).items() if k != "what"},
            "name": point.name,
            "distinct": asked_for(cell.owners),
            "us": took,
            "floor_us": self.floor_us,
            "error": error(point, cell, got),
        }


def compiled(point: Point, cell: Cell, machine: Machine) -> Measured:
    """Return the point with its programs: one op for the check, and many in a chain."""
    floor_us = bytes_moved(point, cell.owners) / machine.bandwidth * 1e6
    count = cell.sets
    repeats = repeats_for(floor_us, count)

    def check(y, inputs, pools, rows):
        return apply(point, y, inputs, pools)[rows]

    def chain(outs, inputs, pools):
        given = list(outs)
        with all_run():
            for i in range(repeats * count):
                outs[i % count] = apply(point, outs[i % count], inputs[i % count], pools)
                # Else XLA runs all calls of a set before those of the next, and L2 keeps its y.
                outs = list(jax.lax.optimization_barrier(tuple(outs)))
        # What a shrink returned would lie elsewhere at each call: XLA would make the graph anew.
        return given if point.op == "shrink" else outs

    y = jax.ShapeDtypeStruct(cell.ys[0].shape, jnp.bfloat16)
    pools, sets = cell.pools.shapes(point), cell.shapes
    out = sets[0].h if point.op == "shrink" else y
    rows = jax.ShapeDtypeStruct((CHECKED,), jnp.int32)
    return Measured(
        point,
        cell,
        floor_us,
        repeats,
        machine.compile(check, y, sets[0], pools, rows),
        machine.compile(chain, [out] * count, sets, pools, donate=(0,)),
    )


def points() -> tuple[Point, ...]:
    """Return the rows of the table, as bench.kernels.jobs says."""
    return POINTS


def jobs(points: list[Point], machine: Machine) -> list[Job]:
    """Return the points' jobs, as bench.kernels.jobs says."""
    pools, prepared = PoolsBySize(points), []
    for _, own in itertools.groupby(points, key=lambda point: point.cell):
        some = list(own)
        cell = Cell(some[0], pools, machine)
        for point in some:
            done = compiled(point, cell, machine)
            programs = (cell.made, done.check, done.chain)
            prepared.append(Job(point.name, programs, done.measure))
    return prepared
