"""Experts' matrices: decode is bound by the weights' bytes, prefill by a dense matmul's rate.

That rate is XLA's with as much work. Both are sampled in turn, and with them torch's grouped matmul
where torch is: long multiplications heat a card until its clock falls, by a tenth and more, and so
each would depend on what ran before it, or on the day.
"""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import experts
from bench.kernels.jobs import Job, Machine
from bench.kernels.numbers import Numbers
from bench.kernels.peers import torch_grouped_matmul
from bench.kernels.timing import repeats_for, time_us, times_in_turn_us
from lora_jax.ops.cases import popular
from lora_jax.ops.grouped_matmul import grouped_matmul

CHECKED = 7  # rows of a result, against float64
EVERY = 16  # of their columns one is


@dataclasses.dataclass(frozen=True)
class Point:
    """One row of the table."""

    what: str
    rows: int
    groups: int
    d_out: int
    d_in: int
    sets: int
    peer_us: float | None = None
    bar_us: float | None = None
    bar_of_dense: float | None = None

    @property
    def name(self) -> str:
        """The row's name in the table."""
        return f"grouped matmul {self.groups} x {self.d_out} x {self.d_in}, {self.what}"

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.rows * self.d_out * self.d_in


POINTS = (
    Point("decode, qwen3-30b-a3b, 64 tokens", 512, 128, 768, 2048, 2, peer_us=129.8, bar_us=104),
    Point("decode, mixtral-8x7b, 64 tokens", 128, 8, 14336, 4096, 2),
    Point("prefill, mixtral-8x7b, 4096 tokens", 8192, 8, 14336, 4096, 1, 1394, bar_of_dense=0.9),
)


@dataclasses.dataclass(frozen=True)
class Measured:
    """A point with its programs; `dense` is of one map with as much work, where that is the bar."""

    point: Point
    ids: np.ndarray  # group of each row
    floor_us: float
    repeats: int
    grouped: Future
    dense: Future | None

    @property
    def x(self) -> Numbers:
        """The rows' numbers."""
        return Numbers((self.point.rows, self.point.d_in), 9)

    @property
    def weights(self) -> list[Numbers]:
        """Each set's numbers."""
        p = self.point
        shape, scale = (p.groups, p.d_out, p.d_in), p.d_in**-0.5
        return [Numbers(shape, 20 + i, scale) for i in range(p.sets)]

    @property
    def programs(self) -> tuple[Future, ...]:
        """Programs to compile before the measurement."""
        return (self.grouped, self.dense) if self.dense else (self.grouped,)

    def measure(self) -> dict[str, Any]:
        """Return the point's row of the table."""
        point, ops = self.point, self.repeats * self.point.sets
        x, ws = self.x.on_device(), [w.on_device() for w in self.weights]
        sizes = jnp.asarray(np.bincount(self.ids, minlength=point.groups).astype(np.int32))
        xs = [x + jnp.bfloat16(i) for i in range(self.repeats)]  # equal calls would be made once
        program = self.grouped.result()
        row = {
            "name": point.name,
            "op": "grouped_matmul",
            "rows": point.rows,
            "floor_us": self.floor_us,
            "peer_us": point.peer_us,
            "bar_us": point.bar_us,
            "error": self.error(np.asarray(program(xs, ws, sizes)[0])),
        }
        if self.dense is None:
            row["us"] = time_us(lambda _: program(xs, ws, sizes), [], ops)
        else:
            row |= self.in_turn(functools.partial(program, xs, ws, sizes), xs, ws[0], sizes)
        return row | {"tflop_per_s": point.flops / row["us"] * 1e-6}

    def in_turn(
        self, program: Callable, xs: list[jax.Array], w: jax.Array, sizes: jax.Array
    ) -> dict[str, float]:
        """Return the time beside that of XLA's dense map of the same rows, which sets the bar.

        And beside torch's, if it is here: the peer's time of another day is no measure then.
        """
        assert self.dense is not None
        assert self.point.bar_of_dense is not None
        one = Numbers((self.point.d_out, self.point.d_in), 8, self.point.d_in**-0.5).on_device()
        programs = [program, functools.partial(self.dense.result(), xs, one)]
        peer = torch_grouped_matmul(xs, w, sizes)
        us, dense_us, *peer_us = times_in_turn_us(programs + ([peer] if peer else []), len(xs))
        row = {"us": us, "dense_us": dense_us, "bar_us": dense_us / self.point.bar_of_dense}
        return row | ({"peer_us": peer_us[0]} if peer_us else {})

    def error(self, y: np.ndarray) -> float:
        """Return the largest relative error of some columns of some rows against float64."""
        point, worst = self.point, 0.0
        for row in np.linspace(0, point.rows - 1, CHECKED).astype(int):
            first = int(self.ids[row]) * point.d_out
            w = self.weights[0].rows(np.arange(first, first + point.d_out, EVERY))
            want = w @ self.x.rows([row])[0]
            mine = y[row, ::EVERY].astype(np.float64)
            worst = max(worst, float(np.linalg.norm(mine - want) / np.linalg.norm(want)))
        return worst


def compiled(point: Point, machine: Machine) -> Measured:
    """Return the point with its programs."""
    ids = np.sort(popular("uniform", point.rows, point.groups, np.random.default_rng(0)))
    touched = len(set(ids)) * point.d_out * point.d_in + point.rows * (point.d_in + point.d_out)
    floor_us = max(2.0 * touched / machine.bandwidth, point.flops / machine.dense) * 1e6
    repeats = repeats_for(floor_us, point.sets)
    multiply = functools.partial(grouped_matmul, implementation="pallas_gpu")
    x = jax.ShapeDtypeStruct((point.rows, point.d_in), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((point.groups, point.d_out, point.d_in), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((point.groups,), jnp.int32)

    def grouped(xs, ws, sizes):
        return [multiply(x, w, sizes) for x in xs for w in ws]

    def dense(xs, w):
        return [x @ w.T for x in xs]

    one = jax.ShapeDtypeStruct(w.shape[1:], jnp.bfloat16)
    xs = [x] * repeats
    bar = machine.compile(dense, xs, one) if point.bar_of_dense else None
    program = machine.compile(grouped, xs, [w] * point.sets, sizes)
    return Measured(point, ids, floor_us, repeats, program, bar)


def points() -> tuple[Point | experts.Point, ...]:
    """Return the rows of the table, as bench.kernels.jobs says: products, then whole layers."""
    return (*POINTS, *experts.POINTS)


def jobs(points: list[Point | experts.Point], machine: Machine) -> list[Job]:
    """Return the points' jobs, as bench.kernels.jobs says."""
    products = [compiled(p, machine) for p in points if isinstance(p, Point)]
    results = [Job(done.point.name, done.programs, done.measure) for done in products]
    return results + experts.jobs([p for p in points if isinstance(p, experts.Point)], machine)
