"""Attention over block tables: decode, whose floor is each key and value read once, and a prompt,
whose floor is its arithmetic at the rate of a dense matmul.
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
from bench.kernels.timing import repeats_for, time_us
from cuda_backend.paged_attention import paged_attention
from lora_jax.ops.cases import MODELS
from lora_jax.ops.paged_attention import PagedAttentionArgs, reference

PAGE = 16
CHECKED = 4  # tokens, against the reference


@dataclasses.dataclass(frozen=True)
class Point:
    """One row of the table: a model, its sequences and their positions."""

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


def attend(point: Point, q, pages, batch, op=paged_attention) -> jax.Array:
    """Return what the op gives for the model's sizes."""
    shape = MODELS[point.model]
    sizes = {"scale": shape.k_dim**-0.5, "v_dim": shape.v_dim}
    named = {**batch, **sizes, "sinks": None, "sliding_window": None}
    return op(PagedAttentionArgs(q, *pages, **named))


def checked_tokens(tokens: int) -> np.ndarray:
    """Return the tokens whose results are held against the reference."""
    return np.linspace(0, tokens - 1, CHECKED).astype(int)


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
        point, (q, pages, batch) = self.point, make(self.point)
        got, want = (np.asarray(v, np.float64) for v in self.check.result()(q, pages, batch))
        bar, program = point.bar_over_floor, self.chain.result()
        return {
            "name": point.name,
            "op": "attention",
            "us": time_us(lambda q: program(q, pages, batch), q, self.repeats),
            "floor_us": self.floor_us,
            "bar_us": bar and bar * self.floor_us,
            "error": float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        }


def compiled(point: Point, machine: Machine) -> Measured:
    """Return the point with its programs: one op and the reference, and many ops in a chain."""
    floor_us = floor_of(point, machine.bandwidth, machine.dense)
    repeats, v_dim = repeats_for(floor_us), MODELS[point.model].v_dim

    def check(q, pages, batch):
        some = checked_tokens(len(q))
        few = {name: batch[name][some] for name in ("token_to_seq", "positions")}
        few |= {"block_tables": batch["block_tables"], "num_tokens": jnp.int32(CHECKED)}
        want = attend(point, q[some], pages, few, reference.paged_attention)
        return attend(point, q, pages, batch)[some], want

    def chain(q, pages, batch):
        for _ in range(repeats):  # the next layer's queries depend on this one's result
            q = q.at[..., :v_dim].set(attend(point, q, pages, batch))
        return q

    shapes = jax.eval_shape(functools.partial(make, point))
    checked = machine.compile(check, *shapes)
    return Measured(point, floor_us, repeats, checked, machine.compile(chain, *shapes, donate=(0,)))


def points() -> tuple[Point, ...]:
    """Return the rows of the table, as bench.kernels.jobs says."""
    return POINTS


def jobs(points: list[Point], machine: Machine) -> list[Job]:
    """Return the points' jobs, as bench.kernels.jobs says."""
    some = [compiled(point, machine) for point in points]
    return [Job(done.point.name, (done.check, done.chain), done.measure) for done in some]
