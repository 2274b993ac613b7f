"""Sorting (token, expert) rows by the matrix they use, and what rerouting and LoRA add to it."""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels.jobs import Job, Machine
from bench.kernels.timing import time_us
from cuda_backend import reroute as cuda
from lora_jax.ops.cases import MODELS, popular
from lora_jax.ops.reroute import reference
from lora_jax.ops.reroute.maps import RowMap
from lora_jax.typing import Array

MODEL, SLOTS, SLOT_EXPERTS, ADAPTERS = "deepseek-v2-lite", 20, 13, 128
CALLS = 160  # of a kernel in one program: less would time the host
PLAIN_CALLS = 8  # of XLA's sort, which takes ten times longer and is compiled for each


@dataclasses.dataclass(frozen=True)
class Point:
    """One row of the table."""

    tokens: int
    peer_us: float | None = None
    bar_us: float | None = None

    @property
    def name(self) -> str:
        """The row's name in the table."""
        return f"added by rerouting, {self.tokens} tokens of {MODEL}, {SLOTS} adapters"


POINTS = (
    Point(64),
    # The best look-up in a launch of its own, and what rerouting may add to a base-only layer.
    Point(16384, peer_us=2.2, bar_us=1.0),
)


def make(tokens: int) -> dict[str, Any]:
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
    results: dict[str, Any] = {n: jnp.asarray(a.astype(np.int32)) for n, a in arrays.items()}
    if tokens <= cuda.lora_gemm.MAX_ROWS:  # that grouped LoRA takes at once
        items = jax.jit(cuda.adapter_items, static_argnums=1)
        results["adapters"] = items(results["lora"], ADAPTERS)
    return results


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


def chain(sort: Callable, tokens: int, calls: int) -> Callable:
    """Return a program of many sort(num_tokens, arrays), each behind the last.

    A link is one more tiny launch, the same in every form: equal calls would be made once, and many
    results would cost the host more than the device.
    """

    def program(live, arrays):
        for _ in range(calls):
            results = sort(live, arrays)
            live = jnp.minimum(live, results.order[0] + tokens)
            if results.items is not None:
                live = jnp.minimum(live, results.items.num_items[0] + tokens)
        return live

    return program


@dataclasses.dataclass(frozen=True)
class Measured:
    """A point with its programs."""

    point: Point
    wrong_places: Future
    chains: dict[str, tuple[Future, int]]  # by form, and of how many sorts

    @property
    def programs(self) -> tuple[Future, ...]:
        """Programs to compile before the measurement."""
        return self.wrong_places, *(program for program, _ in self.chains.values())

    def measure(self) -> dict[str, Any]:
        """Return what fused rerouting adds, and the time of every form."""
        live, arrays, took = jnp.int32(self.point.tokens), make(self.point.tokens), {}
        for name, (future, calls) in self.chains.items():
            program = future.result()
            took[name] = time_us(lambda live, p=program: p(live, arrays), live, calls)
        return {
            "name": self.point.name,
            "op": "reroute",
            "us": took["fused"] - took["base"],
            **{f"{name}_us": us for name, us in took.items()},
            "floor_us": 0.0,
            "peer_us": self.point.peer_us,
            "bar_us": self.point.bar_us,
            "error": int(self.wrong_places.result()(live, arrays)),
        }


def compiled(point: Point, machine: Machine) -> Measured:
    """Return the point with its programs."""
    tokens, sorts = point.tokens, forms()
    live = jax.ShapeDtypeStruct((), jnp.int32)
    arrays = jax.eval_shape(functools.partial(make, tokens))

    def wrong_places(live, arrays):
        """In how many places fused rerouting differs from the reference."""
        got, want = (sorts[name](live, arrays) for name in ("fused", "plain"))
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        return sum((a != b).sum() for a, b in pairs)

    if "adapters" not in arrays:
        del sorts["lora"]
    calls = {name: PLAIN_CALLS if name == "plain" else CALLS for name in sorts}
    chains = {
        name: (machine.compile(chain(sort, tokens, calls[name]), live, arrays), calls[name])
        for name, sort in sorts.items()
    }
    return Measured(point, machine.compile(wrong_places, live, arrays), chains)


def points() -> tuple[Point, ...]:
    """Return the rows of the table, as bench.kernels.jobs says."""
    return POINTS


def jobs(points: list[Point], machine: Machine) -> list[Job]:
    """Return the points' jobs, as bench.kernels.jobs says."""
    some = [compiled(point, machine) for point in points]
    return [Job(done.point.name, done.programs, done.measure) for done in some]
