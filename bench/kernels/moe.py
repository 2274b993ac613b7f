"""LoRA of one whole layer of experts: gate, up and down of every (token, expert) row.

The time holds the layer's row map, which the base needs as well, and all three pairs, gate and up
in one launch; the tokens' items are made once, as in a step. The floor counts each weight of each
(adapter, expert) pair once.
"""

import dataclasses
import functools
import itertools
import statistics
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.jobs import Job, Machine
from bench.kernels.numbers import Numbers
from bench.kernels.timing import cold_sets, repeats_for, time_us
from cuda_backend import reroute
from cuda_backend.lora_gemm import lora_gemms
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.cases import MODELS, ModelShape, popular

SETS = (2, 4)  # of arrays, at least and at most: as many as keep L2 cold
SCALING = 0.5
CHECKED = 5  # rows of each result, against float64
MOST_ADAPTERS = 512  # in pools: sets of more than half as many share some
MATRICES = {"wide": ("gate", "up"), "back": ("down",)}  # by the pools that they lie in
POOL_OF = {name: pool for pool, names in MATRICES.items() for name in names}


@dataclasses.dataclass(frozen=True)
class Point:
    """One row of the table."""

    model: str
    tokens: int
    rank: int
    adapters: int = 128
    peer_us: float | None = None
    bar_us: float | None = None

    @property
    def name(self) -> str:
        """The row's name in the table."""
        size = f"{self.tokens} tokens, {self.adapters} adapters, rank {self.rank}"
        return f"MoE LoRA {self.model}, {size}"

    @property
    def shape(self) -> ModelShape:
        """The model's sizes."""
        return MODELS[self.model]

    @property
    def rows(self) -> int:
        """Pairs of a token and an expert."""
        return self.tokens * self.shape.top_k


POINTS = (
    Point("qwen3-30b-a3b", 256, 32, peer_us=232, bar_us=205),
    Point("mixtral-8x7b", 256, 64, peer_us=516, bar_us=420),
    Point("deepseek-v2-lite", 16, 32, peer_us=43, bar_us=28),
)


class Pools:
    """Rank rows of one model's adapters, A and B by the width of x; gate's lie before up's.

    They have room for `adapters` of every expert; sets with fewer take blocks of their own.
    """

    def __init__(self, model: str, rank: int, adapters: int):
        self.shape, self.rank, self.adapters = MODELS[model], rank, adapters
        m, rows = self.shape, adapters * self.shape.num_experts * rank
        sizes = {"wide": (2 * rows, m.hidden, m.intermediate)}
        sizes["back"] = (rows, m.intermediate, m.hidden)
        self.numbers = {
            f"{pool}_{matrix}": Numbers((count, width), seed, scale)
            for pool, (count, *widths) in sizes.items()
            for seed, (matrix, width, scale) in enumerate(
                zip("ab", widths, (widths[0] ** -0.5, rank**-0.5), strict=True), len(pool)
            )
        }

    @functools.cached_property
    def arrays(self) -> dict[str, jax.Array]:
        """The pools on the device."""
        return {name: numbers.on_device() for name, numbers in self.numbers.items()}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the pools, to compile a program."""
        return {
            name: jax.ShapeDtypeStruct(numbers.shape, jnp.bfloat16)
            for name, numbers in self.numbers.items()
        }

    def entries(self, adapters: int, part: int, parts: int) -> dict[str, np.ndarray]:
        """Return each matrix's table of slots, of the part of the pools that a set takes."""
        blocks = (np.arange(adapters) + part * (self.adapters // parts)) % self.adapters
        table = np.zeros((adapters, 5), np.int32)
        table[:, 0] = table[:, 1] = blocks * self.shape.num_experts * self.rank
        table[:, 2:] = self.rank
        behind = np.zeros(5, np.int32)
        behind[:2] = self.adapters * self.shape.num_experts * self.rank
        return {"gate": table, "up": table + behind, "down": table}


class Layer:
    """The host's side of one of some sets: whose rows stand where, sorted by expert and adapter."""

    def __init__(self, point: Point, pools: Pools, part: int, sets: int):
        self.point, self.pools, rng = point, pools, np.random.default_rng(part + 1)
        experts, k = point.shape.num_experts, point.shape.top_k
        self.owners = popular("zipf", point.tokens, point.adapters, rng)
        chosen = np.argsort(rng.random((point.tokens, experts)), axis=1)[:, :k]
        order = np.lexsort((np.repeat(self.owners, k), chosen.reshape(-1)))  # as the row map sorts
        self.chosen = chosen.astype(np.int32)
        self.row_to_slot = np.repeat(self.owners, k)[order]
        self.row_to_expert = chosen.reshape(-1)[order].astype(np.int32)
        self.entries = pools.entries(point.adapters, part, sets)
        widths = {"wide": point.shape.hidden, "back": point.shape.intermediate}
        self.xs = {
            pool: Numbers((point.rows, width), 10 * part + i)
            for i, (pool, width) in enumerate(widths.items())
        }
        outs = {"gate": widths["back"], "up": widths["back"], "down": widths["wide"]}
        self.ys = {
            name: Numbers((point.rows, width), 10 * part + 5 + i)
            for i, (name, width) in enumerate(outs.items())
        }

    @property
    def weight_bytes(self) -> float:
        """Bytes of the adapters that the rows ask for."""
        m = self.point.shape
        return 2.0 * self.distinct * self.point.rank * 3 * (m.hidden + m.intermediate)

    @property
    def distinct(self) -> int:
        """Number of distinct (adapter, expert) pairs of the rows."""
        return len(set(zip(self.row_to_slot, self.row_to_expert, strict=True)))

    def arrays(self) -> dict[str, jax.Array]:
        """Return the set's arrays on the device, without pools and results."""
        fields = {name: getattr(self, name) for name in ("owners", "row_to_slot", "row_to_expert")}
        fields |= {f"{name}_entries": table for name, table in self.entries.items()}
        fields["scaling"] = np.full((self.point.adapters,), SCALING, np.float32)
        results = {name: jnp.asarray(value) for name, value in fields.items()}
        return results | {f"{pool}_x": x.on_device() for pool, x in self.xs.items()}

    def results(self) -> dict[str, jax.Array]:
        """Return what the adapters are added to."""
        return {name: y.on_device() for name, y in self.ys.items()}

    def deltas(self, name: str, row: int, x: np.ndarray) -> np.ndarray:
        """Return in float64 what a row's adapter adds at one matrix."""
        own, pool = self.entries[name][self.row_to_slot[row]], POOL_OF[name]
        start = own[0] + self.row_to_expert[row] * self.pools.rank
        places = np.arange(start, start + self.pools.rank)
        a, b = (self.pools.numbers[f"{pool}_{matrix}"].rows(places) for matrix in "ab")
        return SCALING * (a @ x) @ b

    def checked_rows(self) -> np.ndarray:
        """Return the rows of results that are held against float64."""
        return np.linspace(0, self.point.rows - 1, CHECKED).astype(np.int32)


def apply(
    point: Point, ys: dict, s: dict, pools: dict, chosen: jax.Array, adapters: AdapterItems
) -> dict:
    """Return each y plus its rows' adapters; `chosen` are the layer's experts of each token."""
    live, experts = jnp.int32(point.tokens), point.shape.num_experts
    items = reroute.row_map(chosen, live, experts, adapters).items
    owners, done = (s["row_to_slot"], s["row_to_expert"], point.rank, items), {}
    for pool, names in MATRICES.items():
        modules = [(ys[name], s[f"{name}_entries"], s["scaling"]) for name in names]
        matrices = (pools[f"{pool}_a"], pools[f"{pool}_b"])
        added = lora_gemms(modules, s[f"{pool}_x"], *matrices, *owners)
        done |= dict(zip(names, added, strict=True))
    return done


def error(layer: Layer, got: dict[str, np.ndarray]) -> float:
    """Return the largest relative error of the checked rows against float64."""
    worst = 0.0
    for name, y in layer.ys.items():
        for row, mine in zip(layer.checked_rows(), got[name].astype(np.float64), strict=True):
            x, old = layer.xs[POOL_OF[name]].rows([row])[0], y.rows([row])[0]
            want = old + layer.deltas(name, row, x)
            worst = max(worst, float(np.linalg.norm(mine - want) / np.linalg.norm(want)))
    return worst


@dataclasses.dataclass(frozen=True)
class Measured:
    """A point with its layers and programs."""

    point: Point
    layers: list[Layer]
    repeats: int
    floor_us: float
    items: Future
    check: Future
    chain: Future

    @property
    def programs(self) -> tuple[Future, ...]:
        """Programs to compile before the measurement."""
        return self.items, self.check, self.chain

    def measure(self) -> dict[str, Any]:
        """Return the point's row of the table."""
        point, pools = self.point, self.layers[0].pools.arrays
        sets = [layer.arrays() for layer in self.layers]
        adapters = [self.items.result()(s["owners"]) for s in sets]
        ys = [layer.results() for layer in self.layers]
        # Layers route differently: a copy of the choice for each, so that each sorts its rows.
        chosen = [[jnp.asarray(la.chosen) for la in self.layers] for _ in range(self.repeats)]
        rows = self.layers[0].checked_rows()
        got = self.check.result()(ys[0], sets[0], pools, chosen[0][0], adapters[0], rows)
        worst = error(self.layers[0], {name: np.asarray(y) for name, y in got.items()})
        program, others = self.chain.result(), (sets, pools, chosen, adapters)
        return {
            **dataclasses.asdict(point),
            "name": point.name,
            "op": "moe",
            "rows": point.rows,
            "distinct": statistics.mean(layer.distinct for layer in self.layers),
            "us": time_us(lambda ys: program(ys, *others), ys, self.repeats * len(self.layers)),
            "floor_us": self.floor_us,
            "error": worst,
        }


def layers_of(point: Point, pools: Pools) -> list[Layer]:
    """Return as many layers as keep L2 cold; the first is the same however many there are."""
    sets = cold_sets(Layer(point, pools, 0, 1).weight_bytes, *SETS)
    return [Layer(point, pools, part, sets) for part in range(sets)]


def compiled(point: Point, pools: Pools, machine: Machine) -> Measured:
    """Return the point with its programs: one layer for the check, and many in a chain."""
    layers, m = layers_of(point, pools), point.shape
    weights = statistics.mean(layer.weight_bytes for layer in layers)
    moved = weights + 2.0 * point.rows * (2 * m.hidden + 3 * m.intermediate)
    floor_us = moved / machine.bandwidth * 1e6
    count = len(layers)
    repeats = repeats_for(floor_us + 15, count)

    def items(owners):
        return reroute.adapter_items(owners, point.adapters, point.rank)

    def check(ys, s, pools, chosen, adapters, rows):
        done = apply(point, ys, s, pools, chosen, adapters)
        return {name: y[rows] for name, y in done.items()}

    def chain(ys, sets, pools, chosen, adapters):
        for layer in chosen:
            for i in range(count):
                ys[i] = apply(point, ys[i], sets[i], pools, layer[i], adapters[i])
        return ys

    s, y = jax.eval_shape(layers[0].arrays), jax.eval_shape(layers[0].results)
    chosen = jax.ShapeDtypeStruct(layers[0].chosen.shape, jnp.int32)
    rows = jax.ShapeDtypeStruct((CHECKED,), jnp.int32)
    known = jax.eval_shape(items, s["owners"])
    many = ([y] * count, [s] * count, pools.shapes, [[chosen] * count] * repeats, [known] * count)
    return Measured(
        point,
        layers,
        repeats,
        floor_us,
        machine.compile(items, s["owners"]),
        machine.compile(check, y, s, pools.shapes, chosen, known, rows),
        machine.compile(chain, *many, donate=(0,)),
    )


def points() -> tuple[Point, ...]:
    """Return the rows of the table, as bench.kernels.jobs says."""
    return POINTS


def jobs(points: list[Point], machine: Machine) -> list[Job]:
    """Return the points' jobs, as bench.kernels.jobs says."""
    results = []
    for (model, rank), own in itertools.groupby(points, key=lambda p: (p.model, p.rank)):
        some = list(own)
        most = max(p.adapters for p in some)
        pools = Pools(model, rank, max(most, min(SETS[1] * most, MOST_ADAPTERS)))
        for point in some:
            done = compiled(point, pools, machine)
            results.append(Job(point.name, done.programs, done.measure))
    return results
