"""LoRA of one whole layer of experts: gate, up and down of every (token, expert) row.

The time holds the list of rows, gate and up in one launch as the model has them, and down; rows
come sorted by expert, as the base's grouped matmul leaves them. The floor counts each weight of
each (adapter, expert) pair once.
"""

import dataclasses
import functools
import statistics
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.timing import random, repeats_for, time_us
from cuda_backend.lora_gemm import lora_gemms
from lora_jax.ops.cases import MODELS, popular

SETS = 2
SIDES = {"in": ("gate", "up"), "out": ("down",)}  # of the experts: maps of one x


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
    """Return the arrays of one layer: pools by matrix, tables, sorted rows and their owners."""
    shape, rng = MODELS[point.model], np.random.default_rng(seed)
    experts, k = shape.num_experts, shape.top_k
    owners = popular("zipf", point.tokens, point.adapters, rng)
    chosen = np.argsort(rng.random((point.tokens, experts)), axis=1)[:, :k]
    order = np.argsort(chosen.reshape(-1), kind="stable")
    entries = np.zeros((point.adapters, 5), np.int32)
    entries[:, 0] = entries[:, 1] = np.arange(point.adapters) * experts * point.rank
    entries[:, 2:] = point.rank
    pool, rows = point.adapters * experts * point.rank, point.tokens * k
    wide, hidden = shape.intermediate, shape.hidden
    behind = np.array([pool, pool, 0, 0, 0], np.int32)  # up lies behind gate in their pools
    arrays = {
        "entries": {name: jnp.asarray(entries) for name in ("gate", "down")}
        | {"up": jnp.asarray(entries + behind)},
        "scaling": jnp.full((point.adapters,), 0.5, jnp.float32),
        "row_to_slot": jnp.asarray(np.repeat(owners, k)[order]),
        "row_to_expert": jnp.asarray(chosen.reshape(-1)[order].astype(np.int32)),
    }
    widths = {"in": (hidden, wide, 2 * pool), "out": (wide, hidden, pool)}
    for i, (side, (d_in, d_out, pool_rows)) in enumerate(widths.items()):
        key = 100 * seed + 10 * i
        arrays[side] = {
            "x": random(key, (rows, d_in)),
            "a": random(key + 1, (pool_rows, d_in), d_in**-0.5),
            "b": random(key + 2, (pool_rows, d_out), point.rank**-0.5),
        }
    return arrays


def apply(rank: int, ys: dict, s: dict, row_to_slot: jax.Array) -> dict:
    """Return each y plus its rows' adapters."""
    new = {}
    for side, names in SIDES.items():
        modules = [(ys[name], s["entries"][name], s["scaling"]) for name in names]
        pools = (s[side]["x"], s[side]["a"], s[side]["b"])
        outs = lora_gemms(modules, *pools, row_to_slot, s["row_to_expert"], rank)
        new |= dict(zip(names, outs, strict=True))
    return new


def error(rank: int, ys: dict, s: dict) -> float:
    """Return the largest relative error of some rows against float64."""
    got = jax.jit(functools.partial(apply, rank))(ys, s, s["row_to_slot"])
    slots, experts = np.asarray(s["row_to_slot"]), np.asarray(s["row_to_expert"])
    worst = 0.0
    for side, name in ((side, name) for side, names in SIDES.items() for name in names):
        for row in np.linspace(0, len(slots) - 1, 5).astype(int):
            start = int(s["entries"][name][slots[row], 0]) + experts[row] * rank
            a, b = (np.asarray(s[side][m][start : start + rank], np.float64) for m in "ab")
            x, old = (np.asarray(v[row], np.float64) for v in (s[side]["x"], ys[name]))
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
    rows, width = point.tokens * shape.top_k, shape.hidden + shape.intermediate
    floor_us = 3 * 2.0 * width * (distinct * point.rank + rows) / bandwidth * 1e6
    sizes = {"gate": shape.intermediate, "up": shape.intermediate, "down": shape.hidden}
    ys = [
        {name: random(7 * i + j, (rows, d)) for j, (name, d) in enumerate(sizes.items())}
        for i in range(SETS)
    ]
    worst = error(point.rank, ys[0], sets[0])
    repeats = repeats_for(floor_us + 15, SETS)

    # Layers route differently: a copy of the owners for each, so that each sorts its rows.
    owners = [[s["row_to_slot"].copy() for s in sets] for _ in range(repeats)]

    @functools.partial(jax.jit, donate_argnums=0)
    def program(ys, sets, owners):
        for layer in owners:
            for i in range(SETS):
                ys[i] = apply(point.rank, ys[i], sets[i], layer[i])
        return ys

    took = time_us(lambda ys: program(ys, sets, owners), ys, repeats * SETS)
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
