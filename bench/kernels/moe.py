"""LoRA of one whole layer of experts: gate, up and down of every (token, expert) row.

The time holds the layer's row map, which the base needs as well, and all three pairs, gate and up
in one launch; the tokens' items are made once, as in a step. The floor counts each weight of each
(adapter, expert) pair once.
"""

import dataclasses
import functools
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.timing import random, repeats_for, time_us
from cuda_backend import reroute
from cuda_backend.lora_gemm import lora_gemms
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.cases import MODELS, popular

SETS = 2
MATRICES = {"wide": ("gate", "up"), "back": ("down",)}  # by the pools that they lie in


@dataclasses.dataclass(frozen=True)
class Point:
    model: str
    tokens: int
    rank: int
    adapters: int = 128
    peer_us: float | None = None
    bar_us: float | None = None


POINTS = (
    Point("qwen3-30b-a3b", 256, 32, peer_us=232, bar_us=205),
    Point("mixtral-8x7b", 256, 64, peer_us=516, bar_us=420),
    Point("deepseek-v2-lite", 16, 32, peer_us=43, bar_us=28),
)


def make_set(point: Point, seed: int) -> dict:
    """Return the arrays of one layer: pools by width of x, tables, sorted rows and their owners.

    Gate and up read the same x and lie in the same pools, one behind the other.
    """
    shape, rng = MODELS[point.model], np.random.default_rng(seed)
    experts, k = shape.num_experts, shape.top_k
    owners = popular("zipf", point.tokens, point.adapters, rng)
    chosen = np.argsort(rng.random((point.tokens, experts)), axis=1)[:, :k]
    order = np.lexsort((np.repeat(owners, k), chosen.reshape(-1)))  # as the row map sorts
    pool, rows = point.adapters * experts * point.rank, point.tokens * k
    arrays = {
        "scaling": jnp.full((point.adapters,), 0.5, jnp.float32),
        "owners": jnp.asarray(owners),
        "chosen": jnp.asarray(chosen.astype(np.int32)),
        "row_to_slot": jnp.asarray(np.repeat(owners, k)[order]),
        "row_to_expert": jnp.asarray(chosen.reshape(-1)[order].astype(np.int32)),
    }
    entries = np.zeros((point.adapters, 5), np.int32)
    entries[:, 0] = entries[:, 1] = np.arange(point.adapters) * experts * point.rank
    entries[:, 2:] = point.rank
    for name, start in (("gate", 0), ("up", pool), ("down", 0)):
        arrays[f"{name}_entries"] = jnp.asarray(
            entries + np.array([start, start, 0, 0, 0], np.int32)
        )
    sizes = {
        "wide": (2, shape.hidden, shape.intermediate),
        "back": (1, shape.intermediate, shape.hidden),
    }
    for i, (name, (count, d_in, d_out)) in enumerate(sizes.items()):
        key = 100 * seed + 10 * i
        arrays[f"{name}_x"] = random(key, (rows, d_in))
        arrays[f"{name}_a"] = random(key + 1, (count * pool, d_in), d_in**-0.5)
        arrays[f"{name}_b"] = random(key + 2, (count * pool, d_out), point.rank**-0.5)
    return arrays


def apply(point: Point, ys: dict, s: dict, chosen: jax.Array, adapters: AdapterItems) -> dict:
    """Return each y plus its rows' adapters; `chosen` are the layer's experts of each token."""
    live, experts = jnp.int32(point.tokens), MODELS[point.model].num_experts
    items = reroute.row_map(chosen, live, experts, adapters).items
    owners, done = (s["row_to_slot"], s["row_to_expert"], point.rank, items), {}
    for pool, names in MATRICES.items():
        modules = [(ys[name], s[f"{name}_entries"], s["scaling"]) for name in names]
        added = lora_gemms(modules, s[f"{pool}_x"], s[f"{pool}_a"], s[f"{pool}_b"], *owners)
        done |= dict(zip(names, added, strict=True))
    return done


def token_items(point: Point, s: dict) -> AdapterItems:
    """Return what a step knows of its tokens' adapters."""
    return jax.jit(reroute.adapter_items, static_argnums=1)(s["owners"], point.adapters)


def error(point: Point, ys: dict, s: dict) -> float:
    """Return the largest relative error of some rows against float64."""
    rank, adapters = point.rank, token_items(point, s)
    got = jax.jit(functools.partial(apply, point))(ys, s, s["chosen"], adapters)
    slots, experts = np.asarray(s["row_to_slot"]), np.asarray(s["row_to_expert"])
    worst = 0.0
    for pool, name in ((pool, name) for pool, names in MATRICES.items() for name in names):
        for row in np.linspace(0, len(slots) - 1, 5).astype(int):
            start = int(s[f"{name}_entries"][slots[row], 0]) + experts[row] * rank
            a, b = (np.asarray(s[f"{pool}_{m}"][start : start + rank], np.float64) for m in "ab")
            x, old = (np.asarray(v[row], np.float64) for v in (s[f"{pool}_x"], ys[name]))
            want = old + 0.5 * (a @ x) @ b
            mine = np.asarray(got[name][row], np.float64)
            worst = max(worst, float(np.linalg.norm(mine - want) / np.linalg.norm(want)))
    return worst


def measure(point: Point, bandwidth: float) -> dict:
    """Return the point's row of the table."""
    sets = [make_set(point, seed + 1) for seed in range(SETS)]
    distinct = statistics.mean(
        len(set(zip(*(np.asarray(s[f"row_to_{n}"]) for n in ("slot", "expert")), strict=True)))
        for s in sets
    )
    shape = MODELS[point.model]
    rows, hidden, wide = point.tokens * shape.top_k, shape.hidden, shape.intermediate
    weights = distinct * point.rank * 3 * (hidden + wide)
    floor_us = 2.0 * (weights + rows * (2 * hidden + 3 * wide)) / bandwidth * 1e6
    sizes = {"gate": shape.intermediate, "up": shape.intermediate, "down": shape.hidden}
    ys = [
        {name: random(7 * i + j, (rows, d)) for j, (name, d) in enumerate(sizes.items())}
        for i in range(SETS)
    ]
    worst = error(point, ys[0], sets[0])
    repeats = repeats_for(floor_us + 15, SETS)

    # Layers route differently: a copy of the choice for each, so that each sorts its rows.
    chosen = [[s["chosen"].copy() for s in sets] for _ in range(repeats)]
    adapters = [token_items(point, s) for s in sets]

    @functools.partial(jax.jit, donate_argnums=0)
    def program(ys, sets, chosen, adapters):
        for layer in chosen:
            for i in range(SETS):
                ys[i] = apply(point, ys[i], sets[i], layer[i], adapters[i])
        return ys

    took = time_us(lambda ys: program(ys, sets, chosen, adapters), ys, repeats * SETS)
    name = f"MoE LoRA {point.model}, {point.tokens} tokens, {point.adapters} adapters"
    return {
        **dataclasses.asdict(point),
        "name": f"{name}, rank {point.rank}",
        "op": "moe",
        "rows": rows,
        "distinct": distinct,
        "us": took,
        "floor_us": floor_us,
        "error": worst,
    }


def rows(bandwidth: float, dense: float) -> Iterator[dict]:
    """Yield the rows of the table."""
    for point in POINTS:
        yield measure(point, bandwidth)
