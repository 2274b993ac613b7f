"""Merging an adapter into all layers of a module; the floor is one pass over the weights."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.timing import random, repeats_for, time_us
from cuda_backend.merge import merge

LAYERS, D_OUT, D_IN, RANK = 32, 4096, 4096, 64
PEER_US, BAR_US = 849, 600


def error(got: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, scaling: float) -> float:
    """Return the largest relative error of some rows of some matrices against float64."""
    worst = 0.0
    for m, row in ((0, 0), (5, 2047), (LAYERS - 1, D_OUT - 1)):
        own = slice(m * RANK, (m + 1) * RANK)
        columns, weights = np.asarray(b[own, row], np.float64), np.asarray(a[own], np.float64)
        want = np.asarray(w[m, row], np.float64) + scaling * columns @ weights
        mine = np.asarray(got[m, row], np.float64)
        worst = max(worst, float(np.linalg.norm(mine - want) / np.linalg.norm(want)))
    return worst


def rows(bandwidth: float, dense: float) -> Iterator[dict]:
    """Yield the row of the table."""
    w = random(1, (LAYERS, D_OUT, D_IN), D_IN**-0.5)
    a = random(2, (LAYERS * RANK, D_IN), D_IN**-0.5)
    b = random(3, (LAYERS * RANK, D_OUT), RANK**-0.5)
    starts = np.arange(LAYERS, dtype=np.int32) * RANK
    sites = jnp.asarray(np.stack([starts, starts, np.full(LAYERS, RANK, np.int32)], 1))
    scaling = jnp.full((LAYERS,), 0.5, jnp.float32)
    once = jax.jit(lambda w: merge(w, a, b, sites, scaling, RANK))
    worst = error(once(w), w, a, b, 0.5)
    size = 2.0 * LAYERS * (D_OUT * D_IN * 2 + RANK * (D_IN + D_OUT))
    floor_us = size / bandwidth * 1e6
    repeats = repeats_for(floor_us)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(w):
        for i in range(repeats):  # merge, unmerge, merge ...
            w = merge(w, a, b, sites, scaling if i % 2 else -scaling, RANK)
        return w

    yield {
        "name": f"merge rank {RANK} into {LAYERS} x [{D_OUT}, {D_IN}]",
        "op": "merge",
        "us": time_us(program, w, repeats),
        "floor_us": floor_us,
        "peer_us": PEER_US,
        "bar_us": BAR_US,
        "error": worst,
    }
