"""Sorting (token, expert) rows by the matrix they use, and what rerouting and LoRA add to it."""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.timing import time_us
from cuda_backend import reroute as cuda
from lora_jax.ops.cases import MODELS, popular
from lora_jax.ops.reroute import reference
from lora_jax.ops.reroute.maps import RowMap
from lora_jax.typing import Array

MODEL, SLOTS, SLOT_EXPERTS, ADAPTERS = "deepseek-v2-lite", 20, 13, 128
CALLS = 160  # of a kernel in one program: less would time the host
PLAIN_CALLS = 8  # of XLA's sort, which takes ten times longer and is compiled for each
PEER_US = 2.2  # of the best look-up in a launch of its own
BAR_US = 1.0  # that rerouting may add to a base-only layer of 16384 tokens


def make(tokens: int) -> dict[str, Array]:
    """Return top-k ids, each token's slots, and a table that moves 13 experts of a slot."""
    shape, rng = MODELS[MODEL], np.random.default_rng(0)
    experts = shape.num_experts
    table = np.tile(np.arange(experts), (SLOTS, 1))
    for slot in range(SLOTS):
        moved = rng.permutation(experts)[:SLOT_EXPERTS]
        table[slot, moved] = experts + slot * SLOT_EXPERTS + np.arange(SLOT_EXPERTS)
    arrays = {
        "ids": np.argsort(rng.random((tokens, experts)), axis=1)[:, : shape.top_k],
        "owners": rng.integers(-1, SLOTS, tokens),
        "table": table,
        "lora": popular("zipf", tokens, ADAPTERS, rng),
    }
    return {name: jnp.asarray(a.astype(np.int32)) for name, a in arrays.items()}


def forms() -> dict[str, Callable[[Array, dict], RowMap]]:
    """Return, by name, what sorts the rows of the first n tokens of the arrays."""
    experts = MODELS[MODEL].num_experts
    groups = experts + SLOTS * SLOT_EXPERTS

    def fused(op, n, a):
        return op(a["ids"], a["owners"], a["table"], n, groups)

    def standing_alone(n, a):
        """Look up in a launch of its own, then sort."""
        owners = jnp.where(n >= 0, a["owners"], -1)  # or all calls would share one look-up
        moved = reference.looked_up(a["ids"], owners, a["table"])
        return cuda.row_map(jax.lax.optimization_barrier(moved), n, groups)

    def with_items(n, a):
        """The base's map with the adapters' items; those of the tokens are made once a step."""
        return cuda.row_map(a["ids"], n, experts, a["adapters"])

    return {
        "base": lambda n, a: cuda.row_map(a["ids"], n, experts),
        "fused": functools.partial(fused, cuda.reroute),
        "standing_alone": standing_alone,
        "lora": with_items,
        "plain": functools.partial(fused, reference.reroute),
    }


def timed(sort: Callable, tokens: int, arrays: dict, calls: int) -> float:
    """Return microseconds of one sort(num_tokens, arrays).

    They form a chain, each link one more tiny launch, the same in every form: equal calls would be
    made once, and many results would cost the host more than the device.
    """

    @jax.jit
    def program(live, arrays):
        for _ in range(calls):
            found = sort(live, arrays)
            live = jnp.minimum(live, found.order[0] + tokens)
            if found.items is not None:
                live = jnp.minimum(live, found.items.num_items[0] + tokens)
        return live

    return time_us(lambda live: program(live, arrays), jnp.int32(tokens), calls)


def wrong_places(tokens: int, arrays: dict) -> int:
    """Return in how many places fused rerouting differs from the reference."""
    live, sorts = jnp.int32(tokens), forms()
    got, want = (jax.jit(sorts[name])(live, arrays) for name in ("fused", "plain"))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return sum(int((a != b).sum()) for a, b in pairs)


def rows(bandwidth: float, dense: float) -> Iterator[dict]:
    """Yield, by number of tokens, what fused rerouting adds, and the time of every form."""
    for tokens in (64, 16384):
        arrays = make(tokens)
        wrong = wrong_places(tokens, arrays)
        sorts = forms()
        if tokens <= cuda.lora_gemm.MAX_ROWS:
            arrays["adapters"] = jax.jit(cuda.adapter_items, static_argnums=1)(
                arrays["lora"], ADAPTERS
            )
        else:
            del sorts["lora"]  # grouped LoRA takes no more tokens at once
        calls = {name: PLAIN_CALLS if name == "plain" else CALLS for name in sorts}
        took = {name: timed(sort, tokens, arrays, calls[name]) for name, sort in sorts.items()}
        yield {
            "name": f"added by rerouting, {tokens} tokens of {MODEL}, {SLOTS} adapters",
            "op": "reroute",
            "us": took["fused"] - took["base"],
            **{f"{name}_us": us for name, us in took.items()},
            "floor_us": 0.0,
            "peer_us": PEER_US if tokens == 16384 else None,
            "bar_us": BAR_US if tokens == 16384 else None,
            "error": wrong,
        }
