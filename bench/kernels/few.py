"""Products of few rows with quantised weights: the CUDA kernel of few rows beside Mosaic's.

Weights are cold: arrays rotate, or are larger than L2. `gptq` and `awq` are int4 with float16
scales, `awq` with zero points; `int4` has bfloat16 scales. A row's `over_mosaic` is the time over
Mosaic's in the same run, and its error is against Mosaic's bits: 0 says that they are equal.
"""

import dataclasses
import functools
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.jobs import Job, Machine
from bench.kernels.numbers import random
from bench.kernels.timing import cold_sets, repeats_for, time_us
from bench.quantised_model import FORMATS
from lora_jax.ops.cases import popular
from lora_jax.ops.grouped_matmul import gated_matmul, grouped_matmul, joined_matmul, matmul
from lora_jax.ops.grouped_matmul.orders import for_kernels, order_of

CUDA, MOSAIC = "cuda", "pallas_gpu"
MOST_OPS = 64  # of a program


@dataclasses.dataclass(frozen=True)
class Product:
    """Rows in groups, and matrices [d_out, d_in] of each group: gate and up, or some of one x."""

    what: str
    rows: int
    groups: int
    d_in: int
    d_outs: tuple[int, ...]
    gated: bool = False

    def sizes(self) -> np.ndarray:
        """Return the rows of each group."""
        ids = popular("uniform", self.rows, self.groups, np.random.default_rng(0))
        return np.bincount(ids, minlength=self.groups).astype(np.int32)


EXPERTS = "experts of qwen3-30b-a3b, 64 tokens"
PRODUCTS = (
    Product(f"gate and up, {EXPERTS}", 512, 128, 2048, (768, 768), gated=True),
    Product(f"down, {EXPERTS}", 512, 128, 768, (2048,)),
    Product("gate and up, experts of qwen3-30b-a3b, 1 token", 8, 128, 2048, (768, 768), gated=True),
    Product("q, k and v of qwen3-30b-a3b, 64 rows", 64, 1, 2048, (4096, 512, 512)),
    Product("o of qwen3-30b-a3b, 64 rows", 64, 1, 4096, (2048,)),
    Product("o of qwen3-30b-a3b, 8 rows", 8, 1, 4096, (2048,)),
    Product("q, k and v of llama-3.1-8b, 64 rows", 64, 1, 4096, (4096, 1024, 1024)),
    Product("o of llama-3.1-8b, 64 rows", 64, 1, 4096, (4096,)),
    Product("down of llama-3.1-8b, 1 row", 1, 1, 14336, (4096,)),
    Product("gate of llama-3.1-8b, 1 row", 1, 1, 4096, (14336,)),
)


@dataclasses.dataclass(frozen=True)
class Point:
    """A product in a format."""

    format: str
    product: Product

    @property
    def name(self) -> str:
        return f"{self.format}: {self.product.what}"


def points() -> tuple[Point, ...]:
    """Return the rows of the table, as bench.kernels.jobs says."""
    return tuple(Point(name, product) for name in FORMATS for product in PRODUCTS)


def weights_of(point: Point, seed: int) -> list[Any]:
    """Return the matrices of one set of arrays, as the loader places them."""
    product, make = point.product, jax.jit(FORMATS[point.format])
    found = []
    for i, d_out in enumerate(product.d_outs):
        shape = (product.groups, d_out, product.d_in)
        plain = random(seed * 8 + i, shape, product.d_in**-0.5)
        found.append(for_kernels(jax.block_until_ready(make(plain))))
    return found


def apply(product: Product, implementation: str, x: jax.Array, ws: list, sizes: jax.Array) -> Any:
    """Return the product of one set of arrays."""
    if product.gated:
        gate, up = ws
        return gated_matmul(x, gate, up, sizes, implementation=implementation)
    if len(ws) == 1:
        return grouped_matmul(x, ws[0], sizes, implementation=implementation)
    rows, maps = sizes[0], [w[0] for w in ws]
    if implementation == MOSAIC:  # it has no launch of several quantised maps
        return [matmul(x, w, rows, implementation=implementation) for w in maps]
    return joined_matmul(x, maps, rows, (None,) * len(maps), implementation=implementation)


def floor_bytes(point: Point, ws: list) -> float:
    """Return the fewest bytes: weights of groups with rows and their scales once, rows, results."""
    product = point.product
    stored = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(ws))
    read = stored * np.count_nonzero(product.sizes()) / product.groups
    written = product.d_outs[0] if product.gated else sum(product.d_outs)
    return read + 2.0 * product.rows * (product.d_in + written)


@dataclasses.dataclass(frozen=True)
class Compared:
    """A point with its programs: of the kernel and of Mosaic's, and their results for a check."""

    point: Point
    floor_us: float
    sets: int
    repeats: int
    programs: tuple[Future, ...]
    checks: tuple[Future, ...]

    def measure(self) -> dict[str, Any]:
        """Return the point's row of the table."""
        product = self.point.product
        xs = [random(99 + i, (product.rows, product.d_in)) for i in range(self.repeats)]
        sizes, ops = jnp.asarray(product.sizes()), self.repeats * self.sets
        sets = [weights_of(self.point, seed) for seed in range(self.sets)]
        got, want = (
            np.concatenate(
                [np.asarray(y, np.float64).ravel() for y in check.result()(xs[0], sets[0], sizes)]
            )
            for check in self.checks
        )
        took = []
        for future in self.programs:
            program = future.result()
            took.append(time_us(lambda _, p=program: p(xs, sets, sizes), None, ops))
        return {
            "name": self.point.name,
            "op": "few rows",
            "us": took[0],
            "mosaic_us": took[1],
            "over_mosaic": took[0] / took[1],
            "floor_us": self.floor_us,
            "error": float(np.max(np.abs(got - want))),
        }


def compiled(point: Point, machine: Machine) -> Compared:
    """Return the point with its programs."""
    product = point.product
    one = jax.eval_shape(lambda: _shapes(point))
    moved = floor_bytes(point, one)
    floor_us = moved / machine.bandwidth * 1e6
    sets = cold_sets(moved, 1, 16)
    repeats = max(1, min(repeats_for(floor_us), MOST_OPS) // sets)
    x = jax.ShapeDtypeStruct((product.rows, product.d_in), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((product.groups,), jnp.int32)

    def program(implementation, xs, sets, sizes):  # XLA makes equal products once
        return [apply(product, implementation, x, ws, sizes) for x in xs for ws in sets]

    def check(implementation, x, ws, sizes):
        return jax.tree.leaves(apply(product, implementation, x, ws, sizes))

    both, many = (CUDA, MOSAIC), ([x] * repeats, [one] * sets)
    programs = [machine.compile(functools.partial(program, i), *many, sizes) for i in both]
    checks = [machine.compile(functools.partial(check, i), x, one, sizes) for i in both]
    return Compared(point, floor_us, sets, repeats, tuple(programs), tuple(checks))


def _shapes(point: Point) -> list[Any]:
    """Return the matrices without numbers, their codes in the order of this machine's kernels."""
    product = point.product
    return [
        _in_order(
            FORMATS[point.format](jnp.zeros((product.groups, d_out, product.d_in), jnp.bfloat16))
        )
        for d_out in product.d_outs
    ]


def _in_order(w: Any) -> Any:
    order = getattr(w, "order", None)
    return w if order is None else dataclasses.replace(w, order=order_of(w.codes.shape))


def jobs(points: list[Point], machine: Machine) -> list[Job]:
    """Return the points' jobs, as bench.kernels.jobs says."""
    done = [compiled(point, machine) for point in points]
    return [Job(c.point.name, (*c.programs, *c.checks), c.measure) for c in done]
