"""Attention over block tables: decode, whose floor is each key and value read once, and a prompt,
whose floor is its arithmetic at the rate of a dense matmul.
"""

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
    new_tokens: int = 1  # of each sequence, the last ones of its context
    bar_over_floor: float | None = None

    @property
    def name(self) -> str:
        if self.new_tokens == 1:
            return f"attention {self.model}, {self.sequences} x {self.context} positions"
        return f"attention {self.model}, a prompt of {self.new_tokens}"


POINTS = (
    Point("qwen3-30b-a3b", 64, 2048, bar_over_floor=1.25),
    Point("qwen3-30b-a3b", 8, 8192),
    Point("llama-8b", 64, 2048),
    Point("deepseek-v2-lite", 64, 2048),
    Point("qwen3-30b-a3b", 1, 2048, new_tokens=2048),
    Point("llama-8b", 1, 2048, new_tokens=2048),
    Point("deepseek-v2-lite", 1, 2048, new_tokens=2048),
)


def make(point: Point) -> tuple[jax.Array, tuple, dict[str, jax.Array]]:
    """Return queries, pages of keys and values, and the integers of a step."""
    shape, rng = MODELS[point.model], np.random.default_rng(0)
    per_seq = -(-point.context // PAGE)
    pages = point.sequences * per_seq
    tables = rng.permutation(pages).reshape(point.sequences, per_seq).astype(np.int32)
    page, tokens = (pages, PAGE, shape.kv_heads), point.sequences * point.new_tokens
    new = np.arange(point.context - point.new_tokens, point.context, dtype=np.int32)
    batch = {
        "block_tables": jnp.asarray(tables),
        "token_to_seq": jnp.asarray(np.arange(tokens, dtype=np.int32) // point.new_tokens),
        "positions": jnp.asarray(np.tile(new, point.sequences)),
        "num_tokens": jnp.int32(tokens),
    }
    keys = random(2, (*page, shape.k_dim))
    values = None if shape.latent else random(3, (*page, shape.v_dim))
    return random(1, (tokens, shape.q_heads, shape.k_dim)), (keys, values), batch


def floor_of(point: Point, bandwidth: float, dense: float) -> float:
    """Return the microseconds below which nobody gets."""
    shape, context = MODELS[point.model], point.context
    width = shape.k_dim if shape.latent else shape.k_dim + shape.v_dim
    size = 2.0 * point.sequences * context * shape.kv_heads * width
    seen = point.new_tokens * (context + context - point.new_tokens + 1) / 2
    flops = 2.0 * point.sequences * seen * shape.q_heads * (shape.k_dim + shape.v_dim)
    return max(size / bandwidth, flops / dense if point.new_tokens > 1 else 0.0) * 1e6


def measure(point: Point, bandwidth: float, dense: float) -> dict:
    """Return the point's row of the table."""
    shape = MODELS[point.model]
    q, pages, batch = make(point)
    scale, v_dim = shape.k_dim**-0.5, shape.v_dim

    def attend(q, pages, batch, op=paged_attention):
        return op(q, *pages, **batch, sinks=None, scale=scale, v_dim=v_dim, sliding_window=None)

    some = np.linspace(0, len(q) - 1, 4).astype(int)
    got = np.asarray(jax.jit(attend)(q, pages, batch)[some], np.float64)
    few = {name: batch[name][some] for name in ("token_to_seq", "positions")}
    few |= {"block_tables": batch["block_tables"], "num_tokens": jnp.int32(4)}
    plain = jax.jit(functools.partial(attend, op=reference.paged_attention))
    want = np.asarray(plain(q[some], pages, few), np.float64)
    worst = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    floor_us = floor_of(point, bandwidth, dense)
    repeats = repeats_for(floor_us)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(q, pages, batch):
        for _ in range(repeats):  # the next layer's queries depend on this one's result
            q = q.at[..., :v_dim].set(attend(q, pages, batch))
        return q

    bar = point.bar_over_floor
    return {
        "name": point.name,
        "op": "attention",
        "us": time_us(lambda q: program(q, pages, batch), q, repeats),
        "floor_us": floor_us,
        "bar_us": bar and bar * floor_us,
        "error": worst,
    }


def rows(bandwidth: float, dense: float) -> Iterator[dict]:
    """Yield the rows of the table."""
    for point in POINTS:
        yield measure(point, bandwidth, dense)
