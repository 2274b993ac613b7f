"""Adapters and KV pages in 8 bits beside those in bfloat16, by the kernels of either.

The floor is that of the bytes in 8 bits. LoRA is the pair of one dense module, as the engine calls
it; attention is that of `bench.kernels.attention`. A row's `over_bf16` is the time over bfloat16's
in the same run.
"""

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernels import attention
from bench.kernels.jobs import Job, Machine
from bench.kernels.numbers import random
from bench.kernels.timing import cold_sets, repeats_for, time_us
from cuda_backend.lora_gemm import lora_gemms
from cuda_backend.reroute import adapter_items
from lora_jax.ops.cases import popular
from lora_jax.ops.kv_rows import coded, decoded
from lora_jax.ops.lora_gemm import reference
from lora_jax.ops.lora_gemm.batch import LoraBatch, float_rows

SCALING = 0.5
CHECKED = 5  # rows of a result, against the reference


@dataclasses.dataclass(frozen=True)
class Lora:
    """Rows that ask for adapters of one rank."""

    what: str
    rows: int
    slots: int
    rank: int
    popularity: str
    d_in: int = 4096
    d_out: int = 4096

    @property
    def name(self) -> str:
        return f"int8 pair {self.d_in} -> {self.d_out}, {self.what}, rank {self.rank}"

    def owners(self, seed: int) -> np.ndarray:
        """Return each row's adapter in one set of arrays."""
        rng = np.random.default_rng(seed)
        return popular(self.popularity, self.rows, self.slots, rng).astype(np.int32)

    @property
    def bytes_moved(self) -> float:
        """The fewest bytes: weights once, x and y read, y written."""
        used = len(np.unique(self.owners(0))) * self.rank * (self.d_in + self.d_out)
        return used + 2.0 * self.rows * (self.d_in + 2 * self.d_out)


LORA = (
    Lora("64 tokens, Zipf 1.2", 64, 512, 64, "zipf", d_out=14336),
    Lora("64 tokens, 64 adapters", 64, 64, 64, "distinct"),
    Lora("64 tokens, 64 adapters", 64, 64, 16, "distinct"),
    Lora("64 tokens, 8 adapters", 64, 8, 16, "uniform"),
    Lora("1 token", 1, 8, 16, "identical"),
    Lora("256 tokens, 256 adapters", 256, 256, 32, "distinct"),
    Lora("1024 tokens, Zipf 1.2", 1024, 512, 64, "zipf", d_out=14336),
    Lora("2048 tokens, 4 adapters", 2048, 4, 16, "uniform"),
)


@dataclasses.dataclass(frozen=True)
class Pages:
    """A point of `bench.kernels.attention`, of pages in 8 bits."""

    point: attention.Point

    @property
    def name(self) -> str:
        return f"fp8 {self.point.name}"


ATTENTION = tuple(Pages(point) for point in attention.POINTS if point.context == 2048)


def int8_pool(seed: int, rows: int, width: int) -> jax.Array:
    """Return random rank rows in 8 bits."""
    bits = jax.random.bits(jax.random.key(seed), (rows, width), jnp.uint8)
    scales = jnp.full((rows, 1), 0.01 * width**-0.5, jnp.float32)
    tail = jnp.pad(
        jax.lax.bitcast_convert_type(scales, jnp.int8).reshape(rows, 4), ((0, 0), (0, 12))
    )
    return jnp.concatenate([jax.lax.bitcast_convert_type(bits, jnp.int8), tail], axis=1)


def lora_inputs(point: Lora, sets: int) -> tuple:
    """Return x, entries and owners of each set, and the pools in 8 bits, which sets share out."""
    each = []
    for i in range(sets):
        entries = np.zeros((point.slots, 5), np.int32)
        entries[:, 0] = entries[:, 1] = (np.arange(point.slots) + i * point.slots) * point.rank
        entries[:, 2] = point.rank
        x = random(i, (point.rows, point.d_in))
        each.append((x, jnp.asarray(entries), jnp.asarray(point.owners(i))))
    rows = sets * point.slots * point.rank
    return each, int8_pool(1, rows, point.d_in), int8_pool(2, rows, point.d_out)


def lora_call(point: Lora, y: jax.Array, inputs: tuple, pools: tuple, items: Any) -> jax.Array:
    """Return y with the adapters of one set of inputs added."""
    x, entries, owners = inputs
    scaling = jnp.full((point.slots,), SCALING, jnp.float32)
    modules, (a_pool, b_pool) = [(y, entries, scaling)], pools
    zeros = jnp.zeros_like(owners)
    return lora_gemms(modules, x, a_pool, b_pool, owners, zeros, point.rank, items)[0]


@dataclasses.dataclass(frozen=True)
class Compared:
    """A point with its programs: the check, and chains in bfloat16 and in 8 bits."""

    name: str
    floor_us: float
    repeats: int
    make: Callable[[], tuple]  # the state, its arguments in bfloat16, in 8 bits
    check: Future
    chains: tuple[Future, Future]

    def measure(self) -> dict[str, Any]:
        """Return the point's row of the table."""
        state, *arguments = self.make()
        got, want = (np.asarray(v, np.float64) for v in self.check.result()(state, arguments[1]))
        took = []
        for chain, own in zip(self.chains, arguments, strict=True):
            program = chain.result()
            took.append(time_us(lambda s, p=program, a=own: p(s, a), jnp.copy(state), self.repeats))
        return {
            "name": self.name,
            "op": "8 bits",
            "us": took[1],
            "bf16_us": took[0],
            "over_bf16": took[1] / took[0],
            "floor_us": self.floor_us,
            "error": float(np.linalg.norm(got - want) / np.linalg.norm(want)),
        }


def compiled_lora(point: Lora, machine: Machine) -> Compared:
    """Return the point with its programs."""
    sets = cold_sets(point.slots * point.rank * (point.d_in + point.d_out), 2, 8)
    floor_us = point.bytes_moved / machine.bandwidth * 1e6
    repeats = max(1, repeats_for(floor_us) // sets)

    def make() -> tuple:
        each, *pools = lora_inputs(point, sets)
        wide = tuple(float_rows(pool).astype(jnp.bfloat16) for pool in pools)
        return random(9, (point.rows, point.d_out)), (each, wide), (each, tuple(pools))

    def chain(y, arguments):
        each, pools = arguments
        items = [adapter_items(owners, point.slots, point.rank) for _, _, owners in each]
        for _ in range(repeats):
            for inputs, its in zip(each, items, strict=True):
                y = lora_call(point, y, inputs, pools, its)
        return y

    def check(y, arguments):
        each, pools = arguments
        x, entries, owners = each[0]
        got = lora_call(point, y, each[0], pools, adapter_items(owners, point.slots, point.rank))
        some = np.linspace(0, point.rows - 1, CHECKED).astype(int)
        scaling, zeros = jnp.full((point.slots,), SCALING), jnp.zeros((CHECKED,), jnp.int32)
        rows, (a_pool, b_pool) = (x[some], owners[some]), pools
        few = LoraBatch(rows[0], a_pool, b_pool, entries, scaling, rows[1], zeros, point.rank)
        want = reference.lora_gemm(y[some].astype(jnp.float32), few)
        return got[some], want

    return _compared(point.name, floor_us, repeats * sets, make, check, chain, machine)


def compiled_attention(coded_pages: Pages, machine: Machine) -> Compared:
    """Return the point with its programs; the check is against pages of the same values."""
    point = coded_pages.point
    wide_us = attention.floor_of(point, machine.bandwidth, machine.dense)
    floor_us = wide_us / 2 if point.new_tokens == 1 else wide_us
    repeats, v_dim = repeats_for(floor_us), attention.MODELS[point.model].v_dim

    def make() -> tuple:
        q, pages, batch = attention.make(point)
        rows = tuple(None if page is None else coded(page) for page in pages)
        same = tuple(None if row is None else decoded(row).astype(q.dtype) for row in rows)
        return q, (same, batch), (rows, batch)

    def chain(q, arguments):
        for _ in range(repeats):
            q = q.at[..., :v_dim].set(attention.attend(point, q, *arguments))
        return q

    def check(q, arguments):
        rows, batch = arguments
        same = tuple(None if row is None else decoded(row).astype(q.dtype) for row in rows)
        return attention.attend(point, q, rows, batch), attention.attend(point, q, same, batch)

    return _compared(coded_pages.name, floor_us, repeats, make, check, chain, machine)


def _compared(name, floor_us, ops, make, check, chain, machine: Machine) -> Compared:
    state, wide, narrow = jax.eval_shape(make)
    compiled = functools.partial(machine.compile, chain, state, donate=(0,))
    checked = machine.compile(check, state, narrow)
    return Compared(name, floor_us, ops, make, checked, (compiled(wide), compiled(narrow)))


def points() -> tuple[Lora | Pages, ...]:
    """Return the rows of the table, as bench.kernels.jobs says."""
    return (*LORA, *ATTENTION)


def jobs(points: list[Lora | Pages], machine: Machine) -> list[Job]:
    """Return the points' jobs, as bench.kernels.jobs says."""
    some = [
        compiled_lora(p, machine) if isinstance(p, Lora) else compiled_attention(p, machine)
        for p in points
    ]
    return [Job(done.name, (done.check, *done.chains), done.measure) for done in some]
