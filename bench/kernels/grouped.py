"""Experts' matrices: decode is bound by the weights' bytes, prefill by a dense matmul's rate."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import experts
from bench.kernels.timing import random, repeats_for, time_us
from lora_jax.ops.cases import popular
from lora_jax.ops.grouped_matmul import grouped_matmul


@dataclasses.dataclass(frozen=True)
class Point:
    name: str
    rows: int
    groups: int
    d_out: int
    d_in: int
    sets: int
    peer_us: float | None = None
    bar_us: float | None = None
    bar_of_dense: float | None = None


POINTS = (
    Point("decode, qwen3-30b-a3b, 64 tokens", 512, 128, 768, 2048, 2, peer_us=129.8, bar_us=104),
    Point("decode, mixtral-8x7b, 64 tokens", 128, 8, 14336, 4096, 2),
    Point("prefill, mixtral-8x7b, 4096 tokens", 8192, 8, 14336, 4096, 1, 1394, bar_of_dense=0.9),
)


def error(point: Point, y: jax.Array, x: jax.Array, w: jax.Array, ids: np.ndarray) -> float:
    """Return the largest relative error of some rows against float64."""
    worst = 0.0
    for row in np.linspace(0, point.rows - 1, 7).astype(int):
        want = np.asarray(w[ids[row]], np.float64) @ np.asarray(x[row], np.float64)
        mine = np.asarray(y[row], np.float64)
        worst = max(worst, float(np.linalg.norm(mine - want) / np.linalg.norm(want)))
    return worst


def measure(point: Point, bandwidth: float, dense: float) -> dict:
    """Return the point's row of the table."""
    ids = np.sort(popular("uniform", point.rows, point.groups, np.random.default_rng(0)))
    sizes = jnp.asarray(np.bincount(ids, minlength=point.groups).astype(np.int32))
    shape = (point.groups, point.d_out, point.d_in)
    ws = [random(i, shape, point.d_in**-0.5) for i in range(point.sets)]
    x = random(9, (point.rows, point.d_in))
    multiply = functools.partial(grouped_matmul, implementation="pallas_gpu")
    worst = error(point, jax.jit(multiply)(x, ws[0], sizes), x, ws[0], ids)
    touched = len(set(ids)) * point.d_out * point.d_in + point.rows * (point.d_in + point.d_out)
    flops = 2.0 * point.rows * point.d_out * point.d_in
    floor_us = max(2.0 * touched / bandwidth, flops / dense) * 1e6
    repeats = repeats_for(floor_us, point.sets)
    xs = [x + jnp.bfloat16(i) for i in range(repeats)]  # equal calls would be made once

    @jax.jit
    def program(xs, ws):
        return [multiply(x, w, sizes) for x in xs for w in ws]

    took = time_us(lambda _: program(xs, ws), [], repeats * point.sets)
    bar = point.bar_us or (point.bar_of_dense and flops / dense / point.bar_of_dense * 1e6)
    return {
        "name": f"grouped matmul {point.groups} x {point.d_out} x {point.d_in}, {point.name}",
        "op": "grouped_matmul",
        "rows": point.rows,
        "us": took,
        "tflop_per_s": flops / took * 1e-6,
        "floor_us": floor_us,
        "peer_us": point.peer_us,
        "bar_us": bar,
        "error": worst,
    }


def measure_dense(point: Point, dense: float) -> dict:
    """Return the row of XLA's dense matmul with as much work as the point."""
    x, w = random(9, (point.rows, point.d_in)), random(8, (point.d_in, point.d_out))
    xs = [x + jnp.bfloat16(i) for i in range(2)]
    program = jax.jit(lambda xs, w: [x @ w for x in xs])
    took = time_us(lambda _: program(xs, w), [], len(xs))
    flops = 2.0 * point.rows * point.d_out * point.d_in
    return {
        "name": f"dense matmul of XLA's, {point.rows} x {point.d_in} x {point.d_out}",
        "op": "dense",
        "rows": point.rows,
        "us": took,
        "tflop_per_s": flops / took * 1e-6,
        "floor_us": flops / dense * 1e6,
        "peer_us": None,
        "bar_us": None,
        "error": 0.0,
    }


def rows(bandwidth: float, dense: float) -> Iterator[dict]:
    """Yield the rows of the table: products, then whole layers of experts."""
    for point in POINTS:
        yield measure(point, bandwidth, dense)
        if point.bar_of_dense:
            yield measure_dense(point, dense)
    yield from experts.rows(bandwidth)
