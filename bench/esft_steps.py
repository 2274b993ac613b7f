"""Compiled steps of a woven model, what they are asked, and how long one takes."""

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.esft_model import Woven
from lora_jax.kv_cache import LayerCache, init_cache
from lora_jax.nn import moe
from serving.device_state import init_row_state
from serving.model_runner import NO_REMAT
from serving.step import NUM_TOKENS, SAMPLES, SLOT, START, TABLE_ROWS, StepSizes, run_step

PAGE = 16  # tokens
CALLS, SAMPLES_TAKEN = 10, 5
LONGEST = 0.3  # seconds of enqueued steps in one sample


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; `base_us` is what it is held against."""

    name: str
    us: float
    base_us: float | None = None
    adapters: int = 0
    experts: float | None = None  # distinct ones that are touched, all layers together
    base_experts: float | None = None
    floor_us: float | None = None  # bytes over copy bandwidth
    base_floor_us: float | None = None
    more: dict[str, float] = dataclasses.field(default_factory=dict)

    def show(self) -> str:
        """Return the line."""
        said = f"{self.name:52} {self.us:9.1f} us"
        if self.base_us is not None:
            said += f"  base {self.base_us:9.1f} us  {100 * (self.us / self.base_us - 1):+6.2f}%"
        if self.floor_us is not None and self.base_floor_us is not None:
            floors = 100 * (self.floor_us / self.base_floor_us - 1)
            said += f"  floor {self.floor_us:8.1f} us ({floors:+.1f}%)"
            said += f"  experts {self.experts:.0f} / {self.base_experts:.0f}"
        return said + "".join(f"  {name} {value:.4g}" for name, value in self.more.items())

    def as_json(self) -> dict[str, Any]:
        """Return the row for a result file."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """What one step is asked: the runner's table and block tables."""

    name: str
    table: np.ndarray
    block_tables: np.ndarray
    kv_tokens: int  # whose KV is read, at least once

    def without_adapters(self) -> "Batch":
        """Return the same rows, all of the base model."""
        table = self.table.copy()
        table[SLOT] = -1
        return dataclasses.replace(self, table=table)


@dataclasses.dataclass(frozen=True)
class Took:
    """Microseconds of one step, and the distinct experts it touched in all layers."""

    us: float
    experts: float


def decode_batch(rows: int, context: int, adapters: int, sizes: StepSizes) -> Batch:
    """Return `rows` sequences after `context` tokens, their adapters in turn."""
    table = np.zeros((TABLE_ROWS, sizes.max_seqs), np.int32)
    table[START, :rows], table[NUM_TOKENS, :rows], table[SAMPLES, :rows] = context, 1, 1
    table[SLOT] = np.arange(sizes.max_seqs) % adapters
    name = f"decode, {rows} rows"
    return Batch(name, table, _block_tables(context + 1, sizes), rows * (context + 1))


def prefill_batch(tokens: int, prompts: int, sizes: StepSizes) -> Batch:
    """Return `prompts` prompts of `tokens` tokens together, each with an adapter of its own."""
    table = np.zeros((TABLE_ROWS, sizes.max_seqs), np.int32)
    lengths = np.full(prompts, tokens // prompts)
    lengths[: tokens % prompts] += 1
    table[NUM_TOKENS, :prompts], table[SAMPLES, :prompts] = lengths, 1
    table[SLOT] = np.arange(sizes.max_seqs) % prompts
    return Batch(
        f"prefill, {tokens} tokens", table, _block_tables(int(lengths.max()), sizes), tokens
    )


def _block_tables(tokens: int, sizes: StepSizes) -> np.ndarray:
    """Return distinct pages for sequences of so many tokens, as far as there are any."""
    pages = -(-tokens // PAGE)
    tables = np.zeros((sizes.max_seqs, sizes.max_pages), np.int32)
    fits = min(sizes.max_seqs, sizes.num_pages // pages)
    tables[:fits, :pages] = np.arange(fits * pages).reshape(fits, pages)
    return tables


class Programs:
    """The programs by kind and size: "base", rerouting "fused", and "plain" (JAX operators)."""

    def __init__(self, woven: Woven, wanted: dict):
        self._woven, self._wanted = woven, wanted
        seqs, longest = max(wanted["decode"]), max(*wanted["prefill"], wanted["context"] + PAGE)
        kv = woven.model.kv_shape(woven.config)
        dtype = woven.model.embed.weight[...].dtype
        self.kv_token_bytes = kv.bytes_per_token(dtype)
        self.sizes = StepSizes(
            max_seqs=max(seqs, 32),
            max_len=-(-longest // PAGE) * PAGE,
            page_size=PAGE,
            num_pages=max(seqs * (wanted["context"] // PAGE + 1), 2 * longest // PAGE + 32),
            max_logit_rows=64,
            max_rank=8,
        )
        self._place = functools.partial(jax.device_put, device=woven.plain[0].sharding)
        cache = init_cache(kv, self.sizes.num_pages, PAGE, dtype)
        self._cache = self._place(tuple(_noise(n, layer) for n, layer in enumerate(cache)))
        state = init_row_state(self.sizes.max_seqs, self.sizes.max_len)
        shape, vocab = state.history.shape, woven.config.vocab_size
        history = np.random.default_rng(0).integers(3, vocab, shape).astype(np.int32)
        self._state = self._place(dataclasses.replace(state, history=jnp.asarray(history)))
        self._compiled: dict[tuple, Any] = {}
        self._pool = concurrent.futures.ThreadPoolExecutor(16)

    def compile(self, parts: list[str], say: Callable[[str], None]) -> None:
        """Begin to compile what the parts need, side by side, most wanted first."""
        for kind, bucket in self._needed(parts):
            self._begin(kind, bucket, self._woven.plain if kind == "base" else self._woven.woven)
        say(f"lowered {len(self._compiled)} programs")

    def time(self, kind: str, bucket: int, leaves: Any, tables: Any, batch: Batch) -> Took:
        """Return the median over samples of steps that are enqueued behind one another."""
        step = self.runner(kind, bucket, leaves, tables, batch)
        sizes = jax.block_until_ready(step())
        experts = float(sum(np.count_nonzero(np.asarray(s)) for s in sizes))
        start = time.perf_counter()
        jax.block_until_ready(step())
        calls = int(min(CALLS, max(1, LONGEST / (time.perf_counter() - start))))
        taken = []
        for _ in range(SAMPLES_TAKEN):
            start = time.perf_counter()
            for _ in range(calls):
                sizes = step()
            jax.block_until_ready(sizes)
            taken.append((time.perf_counter() - start) / calls * 1e6)
        return Took(statistics.median(taken), experts)

    def runner(
        self, kind: str, bucket: int, leaves: Any, tables: Any, batch: Batch
    ) -> Callable[[], Any]:
        """Return a function that enqueues one step and returns the sizes of its groups."""
        program = self._begin(kind, bucket, leaves).result()
        given = None if kind == "base" else self._place(np.asarray(tables))
        table, blocks = self._place(batch.table), self._place(batch.block_tables)

        def step():
            out = program(leaves, self._cache, self._state, given, table, blocks)
            self._cache, self._state, sizes = out
            return sizes

        return step

    def _needed(self, parts: list[str]) -> list[tuple[str, int]]:
        """Return kinds and buckets, in the order in which parts ask for them."""
        decode = [max(8, rows) for rows in self._wanted["decode"]]
        prefill, most = list(self._wanted["prefill"]), max(decode)
        both = [most, max(prefill)]
        needed: list[tuple[str, int]] = []
        for part in parts:
            if part in ("decode", "prefill"):
                buckets = decode if part == "decode" else prefill
                needed += [(kind, b) for b in buckets for kind in ("base", "fused")]
            elif part == "rerouting":
                needed += [(kind, b) for b in both for kind in ("base", "fused", "plain")]
            elif part == "profile":
                needed += [("fused", b) for b in decode]
            elif part == "loading":
                needed.append(("fused", decode[0]))
        return list(dict.fromkeys(needed))

    def _begin(self, kind: str, bucket: int, leaves: Any) -> concurrent.futures.Future:
        """Return the program to come; equal ones are compiled once."""
        key = (kind, bucket, *(leaf.shape for leaf in leaves))
        if key not in self._compiled:
            tables = None if kind == "base" else self._place(self._woven.identity)
            table = self._place(np.zeros((TABLE_ROWS, self.sizes.max_seqs), np.int32))
            blocks = np.zeros((self.sizes.max_seqs, self.sizes.max_pages), np.int32)
            arguments = (leaves, self._cache, self._state, tables, table, self._place(blocks))
            lowered = self._program(kind, bucket).lower(*arguments)
            self._compiled[key] = self._pool.submit(lowered.compile)
        return self._compiled[key]

    def _program(self, kind: str, bucket: int) -> Any:
        """Return the runner's step, which also gives the rows of every group of every layer."""
        woven = self._woven

        def step(leaves, cache, state, tables, table, blocks):
            model, sizes = nnx.merge(woven.graphdef, jax.tree.unflatten(woven.treedef, leaves)), []
            plain = {"implementation": "xla"} if kind == "plain" else {}

            def recording(op, options, *args):
                map = op(*args, **options)
                sizes.append(map.group_sizes)
                return map

            with (
                mock.patch.object(moe, "reroute", functools.partial(recording, moe.reroute, plain)),
                mock.patch.object(moe, "row_map", functools.partial(recording, moe.row_map, {})),
            ):
                cache, state, _ = run_step(
                    model, cache, state, None, table, blocks, bucket, self.sizes, tables
                )
            return cache, state, sizes

        options = None if kind == "base" else NO_REMAT
        return jax.jit(step, donate_argnums=(1, 2), compiler_options=options)


def _noise(seed: int, layer: LayerCache) -> LayerCache:
    """Return a layer's cache full of random numbers."""
    fill = jax.jit(lambda key: jax.random.normal(key, layer.k.shape, layer.k.dtype))
    return LayerCache(k=fill(jax.random.key(seed, impl="rbg")), v=layer.v)
