"""Merging an adapter into all layers of a module; the floor is one pass over the weights."""

import dataclasses
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.jobs import Job, Machine
from bench.kernels.numbers import Numbers
from bench.kernels.timing import repeats_for, time_us
from cuda_backend.merge import merge

SCALING = 0.5


@dataclasses.dataclass(frozen=True)
class Point:
    """One row of the table."""

    layers: int
    d_out: int
    d_in: int
    rank: int
    peer_us: float
    bar_us: float

    @property
    def name(self) -> str:
        """The row's name in the table."""
        return f"merge rank {self.rank} into {self.layers} x [{self.d_out}, {self.d_in}]"

    @property
    def numbers(self) -> tuple[Numbers, Numbers, Numbers]:
        """The weights' numbers, A's and B's."""
        w = Numbers((self.layers, self.d_out, self.d_in), 1, self.d_in**-0.5)
        a = Numbers((self.layers * self.rank, self.d_in), 2, self.d_in**-0.5)
        return w, a, Numbers((self.layers * self.rank, self.d_out), 3, self.rank**-0.5)

    @property
    def checked(self) -> tuple[tuple[int, int], ...]:
        """Matrices and rows of theirs that are held against float64."""
        return (0, 0), (self.layers // 2, self.d_out // 2), (self.layers - 1, self.d_out - 1)

    @property
    def bytes_moved(self) -> float:
        """The fewest bytes: weights read and written, factors read."""
        return (
            2.0 * self.layers * (self.d_out * self.d_in * 2 + self.rank * (self.d_in + self.d_out))
        )


POINTS = (Point(32, 4096, 4096, 64, peer_us=849, bar_us=600),)


def error(point: Point, got: np.ndarray) -> float:
    """Return the largest relative error of the checked rows against float64."""
    (w, a, b), worst = point.numbers, 0.0
    for (matrix, row), mine in zip(point.checked, got.astype(np.float64), strict=True):
        own = np.arange(matrix * point.rank, (matrix + 1) * point.rank)
        old = w.rows([matrix * point.d_out + row])[0]
        want = old + SCALING * b.rows(own)[:, row] @ a.rows(own)
        worst = max(worst, float(np.linalg.norm(mine - want) / np.linalg.norm(want)))
    return worst


@dataclasses.dataclass(frozen=True)
class Measured:
    """A point with its programs."""

    point: Point
    floor_us: float
    repeats: int
    check: Future
    chain: Future

    def measure(self) -> dict[str, Any]:
        """Return the point's row of the table."""
        point = self.point
        w, a, b = (numbers.on_device() for numbers in point.numbers)
        got = np.asarray(self.check.result()(w, a, b))
        program = self.chain.result()
        return {
            "name": point.name,
            "op": "merge",
            "us": time_us(lambda w: program(w, a, b), w, self.repeats),
            "floor_us": self.floor_us,
            "peer_us": point.peer_us,
            "bar_us": point.bar_us,
            "error": error(point, got),
        }


def compiled(point: Point, machine: Machine) -> Measured:
    """Return the point with its programs: one merge for the check, and many in a chain."""
    floor_us = point.bytes_moved / machine.bandwidth * 1e6
    repeats = repeats_for(floor_us)
    starts = np.arange(point.layers, dtype=np.int32) * point.rank
    sites = np.stack([starts, starts, np.full(point.layers, point.rank, np.int32)], 1)
    scaling = np.full((point.layers,), SCALING, np.float32)

    def check(w, a, b):
        done = merge(w, a, b, jnp.asarray(sites), jnp.asarray(scaling), point.rank)
        return jnp.stack([done[place] for place in point.checked])

    def chain(w, a, b):
        for i in range(repeats):  # merge, unmerge, merge ...
            sign = jnp.asarray(scaling if i % 2 else -scaling)
            w = merge(w, a, b, jnp.asarray(sites), sign, point.rank)
        return w

    shapes = [jax.ShapeDtypeStruct(numbers.shape, jnp.bfloat16) for numbers in point.numbers]
    checked = machine.compile(check, *shapes)
    return Measured(point, floor_us, repeats, checked, machine.compile(chain, *shapes, donate=(0,)))


def points() -> tuple[Point, ...]:
    """Return the rows of the table, as bench.kernels.jobs says."""
    return POINTS


def jobs(points: list[Point], machine: Machine) -> list[Job]:
    """Return the points' jobs, as bench.kernels.jobs says."""
    some = [compiled(point, machine) for point in points]
    return [Job(done.point.name, (done.check, done.chain), done.measure) for done in some]
