"""Decode attention over block tables; the floor is each key and value read once."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.timing import random, repeats_for, time_us
from cuda_backend.paged_attention import paged_attention
from lora_jax.ops.cases import MODELS
from lora_jax.ops.paged_attention import reference

PAGE = 16


@dataclasses.dataclass(frozen=True)
class Point:
    model: str
    sequences: int
    context: int
    bar_over_floor: float | None = None


POINTS = (
    Point("qwen3-30b-a3b", 64, 2048, bar_over_floor=1.25),
    Point("qwen3-30b-a3b", 8, 8192),
    Point("llama-8b", 64, 2048),
    Point("deepseek-v2-lite", 64, 2048),
)


def make(point: Point) -> tuple[jax.Array, tuple, dict[str, jax.Array]]:
    """Return queries, pages of keys and values, and the integers of a decode step."""
    shape, rng = MODELS[point.model], np.random.default_rng(0)
    per_seq = -(-point.context // PAGE)
    pages = point.sequences * per_seq
    tables = rng.permutation(pages).reshape(point.sequences, per_seq).astype(np.int32)
    page = (pages, PAGE, shape.kv_heads)
    batch = {
        "block_tables": jnp.asarray(tables),
        "token_to_seq": jnp.arange(point.sequences, dtype=jnp.int32),
        "positions": jnp.full((point.sequences,), point.context - 1, jnp.int32),
        "num_tokens": jnp.int32(point.sequences),
    }
    keys = random(2, (*page, shape.k_dim))
    values = None if shape.latent else random(3, (*page, shape.v_dim))
    return random(1, (point.sequences, shape.q_heads, shape.k_dim)), (keys, values), batch


def measure(point: Point, bandwidth: float) -> dict:
    """Return the point's row of the table."""
    shape = MODELS[point.model]
    q, pages, batch = make(point)
    scale, v_dim = shape.k_dim**-0.5, shape.v_dim

    def attend(q, pages, batch, op=paged_attention):
        return op(q, *pages, **batch, sinks=None, scale=scale, v_dim=v_dim, sliding_window=None)

    got = np.asarray(jax.jit(attend)(q, pages, batch)[:4], np.float64)
    few = {name: array[:4] for name, array in batch.items() if name != "num_tokens"}
    plain = jax.jit(functools.partial(attend, op=reference.paged_attention))
    want = np.asarray(plain(q[:4], pages, few | {"num_tokens": jnp.int32(4)}), np.float64)
    worst = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    width = shape.k_dim if shape.latent else shape.k_dim + shape.v_dim
    size = 2.0 * point.sequences * point.context * shape.kv_heads * width
    floor_us = size / bandwidth * 1e6
    repeats = repeats_for(floor_us)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(q, pages, batch):
        for _ in range(repeats):  # the next layer's queries depend on this one's result
            q = q.at[..., :v_dim].set(attend(q, pages, batch))
        return q

    bar = point.bar_over_floor
    return {
        "name": f"attention {point.model}, {point.sequences} x {point.context} positions",
        "op": "attention",
        "us": time_us(lambda q: program(q, pages, batch), q, repeats),
        "floor_us": floor_us,
        "bar_us": bar and bar * floor_us,
        "error": worst,
    }


def rows(bandwidth: float, dense: float) -> Iterator[dict]:
    """Yield the rows of the table."""
    for point in POINTS:
        yield measure(point, bandwidth)
