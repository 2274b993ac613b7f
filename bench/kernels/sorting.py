"""Sorting (token, expert) rows by the matrix they use, and what rerouting adds to it."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.timing import time_us
from cuda_backend import reroute as cuda
from lora_jax.ops.cases import MODELS
from lora_jax.ops.reroute import reference

MODEL, SLOTS, SLOT_EXPERTS, CALLS = "deepseek-v2-lite", 20, 13, 20
BAR_US = 1.0  # that rerouting may add to a base-only layer of 16384 tokens


def make(tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return top-k ids, each token's adapter slot, and a table that moves 13 experts a slot."""
    shape, rng = MODELS[MODEL], np.random.default_rng(0)
    experts = shape.num_experts
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, : shape.top_k]
    owners = rng.integers(-1, SLOTS, tokens)
    table = np.tile(np.arange(experts), (SLOTS, 1))
    for slot in range(SLOTS):
        moved = rng.permutation(experts)[:SLOT_EXPERTS]
        table[slot, moved] = experts + slot * SLOT_EXPERTS + np.arange(SLOT_EXPERTS)
    ids, owners, table = (jnp.asarray(a.astype(np.int32)) for a in (ids, owners, table))
    return ids, owners, table


def timed(sort: Callable, tokens: int, *arrays: jax.Array) -> float:
    """Return microseconds of one sort(num_tokens, *arrays); equal calls would be made once."""
    counts = [jnp.int32(tokens - i) for i in range(CALLS)]
    program = jax.jit(lambda counts, arrays: [sort(n, *arrays) for n in counts])
    state: list = []
    return time_us(lambda _: program(counts, arrays), state, CALLS)


def rows(bandwidth: float, dense: float) -> Iterator[dict]:
    """Yield, by number of tokens, base-only sorting, fused rerouting and plain operators."""
    experts = MODELS[MODEL].num_experts
    groups = experts + SLOTS * SLOT_EXPERTS
    for tokens in (64, 256, 16384):
        ids, owners, table = make(tokens)
        live = jnp.int32(tokens)
        want = reference.reroute(ids, owners, table, live, groups)
        fused = functools.partial(_reroute, cuda.reroute, groups)
        got = jax.jit(fused)(live, ids, owners, table)
        wrong = sum(int((a != b).sum()) for a, b in zip(got, want, strict=True))
        base = timed(lambda n, ids: cuda.row_map(ids, n, experts), tokens, ids)
        took = timed(fused, tokens, ids, owners, table)
        plain = timed(
            functools.partial(_reroute, reference.reroute, groups), tokens, ids, owners, table
        )
        yield {
            "name": f"added by rerouting, {tokens} tokens of {MODEL}, {SLOTS} adapters",
            "op": "reroute",
            "us": took - base,
            "base_us": base,
            "fused_us": took,
            "plain_us": plain,
            "floor_us": 0.0,
            "bar_us": BAR_US if tokens == 16384 else None,
            "error": wrong,
        }


def _reroute(op, groups, live, ids, owners, table):
    return op(ids, owners, table, live, groups)
