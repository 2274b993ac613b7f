"""Steps of a woven model: what they are asked, and how long one takes."""

import concurrent.futures
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.esft_model import Shape, Woven
from bench.esft_programs import PAGE, StepProgram, compile_apart, register_kernels
from bench.step_profile import profile_step
from lora_jax.config import from_hf
from lora_jax.kv_cache import init_cache
from serving.steps.device_state import init_row_state
from serving.steps.step import NUM_TOKENS, SAMPLES, SLOT, START, TABLE_ROWS, StepSizes

WORKERS = 10  # programs that are compiled at a time
SAMPLE_S = 0.15  # of steps behind one another
SAMPLES_TAKEN = 7
PROFILES = 3


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


Step = Callable[..., list[jax.Array]]  # enqueues one; the sizes of its groups, layer by layer


@dataclasses.dataclass(frozen=True)
class Took:
    """Microseconds of one step, sample by sample, and the distinct experts it touched.

    `samples` are by the clock, so that a host that is late shows; `device` is what the kernels of a
    step take, by the profiler, and differs by 0.1% or so from sample to sample. Empty on a CPU.
    """

    samples: list[float]
    device: list[float]
    experts: float  # in all layers together
    dispatch_us: float  # of the host, for one step

    @property
    def us(self) -> float:
        return statistics.median(self.samples)

    def over(self, base: "Took") -> dict[str, float]:
        """Return by how many percent it takes longer, the median over pairs, and their range.

        By the device's own time where that is known, else by the clock.
        """
        pairs = zip(self.device or self.samples, base.device or base.samples, strict=True)
        over = [100 * (mine / its - 1) for mine, its in pairs]
        return {"over %": statistics.median(over), "low %": min(over), "high %": max(over)}


def in_turn(
    steps: dict[str, Step], samples: int = SAMPLES_TAKEN, profiles: int = PROFILES
) -> dict[str, Took]:
    """Return what each step takes, a sample of each in turn, so that drift counts for all alike."""
    experts, calls = {}, {}
    for name, step in steps.items():
        sizes = jax.block_until_ready(step())
        experts[name] = float(sum(np.count_nonzero(np.asarray(s)) for s in sizes))
        calls[name] = max(1, round(SAMPLE_S / _sample(step, 3)[0] * 1e6))
    clock = _turns(steps, samples, lambda name: _sample(steps[name], calls[name]))
    device = _turns(steps, profiles, lambda name: device_us(steps[name]))
    took = {}
    for name in steps:
        by_clock, sent = zip(*clock[name], strict=True)
        known = device[name] if all(device[name]) else []
        took[name] = Took(list(by_clock), known, experts[name], statistics.median(sent))
    return took


def _turns[T](names: Iterable[str], turns: int, of: Callable[[str], T]) -> dict[str, list[T]]:
    """Return what `of` gives for each name in every turn; each second turn goes backwards."""
    names, found = list(names), {name: [] for name in names}
    for turn in range(turns):
        for name in names[:: -1 if turn % 2 else 1]:
            found[name].append(of(name))
    return found


def _sample(step: Step, calls: int) -> tuple[float, float]:
    """Return microseconds of a step among so many behind one another, and of the host for one."""
    start = time.perf_counter()
    for _ in range(calls):
        sizes = step()
    sent = time.perf_counter() - start
    jax.block_until_ready(sizes)
    return (time.perf_counter() - start) / calls * 1e6, sent / calls * 1e6


def device_us(step: Step) -> float:
    """Return what a step's kernels take together, by the profiler; 0 where it sees none."""
    return sum(us for _, us in profile_step(step).values())


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

    def __init__(self, shape: Shape, wanted: dict, ahead: Path | None = None):
        """Compiling may begin; `attach` comes before anything runs."""
        self._shape, self._ahead, config = shape, ahead, from_hf(shape.config)
        seqs, longest = max(wanted["decode"]), max(wanted["longest"], wanted["context"] + PAGE)
        self._base_groups, self._layers = config.experts.num_experts, len(config.experts.layers)
        self.sizes = StepSizes(
            max_seqs=max(seqs, 32),
            max_len=-(-longest // PAGE) * PAGE,
            page_size=PAGE,
            num_pages=max(seqs * (wanted["context"] // PAGE + 1), 2 * longest // PAGE + 32),
            max_logit_rows=64,
            max_rank=8,
        )
        self._compiled: dict[StepProgram, concurrent.futures.Future] = {}
        register_kernels()
        self._pool = concurrent.futures.ThreadPoolExecutor(WORKERS)

    def attach(self, woven: Woven) -> None:
        """Make what the steps of a model need beside its weights."""
        self._woven, kv = woven, woven.model.kv_shape(woven.config)
        dtype = woven.model.embed.weight[...].dtype
        self.kv_token_bytes = kv.bytes_per_token(dtype)
        self._place = functools.partial(jax.device_put, device=woven.plain[0].sharding)
        cache = jax.tree.leaves(init_cache(kv, self.sizes.num_pages, PAGE, dtype))
        self._cache = [_noise(n, pages) for n, pages in enumerate(cache)]
        state = init_row_state(self.sizes.max_seqs, self.sizes.max_len)
        shape, vocab = state.history.shape, woven.config.vocab_size
        history = np.random.default_rng(0).integers(3, vocab, shape).astype(np.int32)
        state = dataclasses.replace(state, history=jnp.asarray(history))
        self._state = self._place(jax.tree.leaves(state))

    def beside_bytes(self) -> dict[str, int]:
        """Return what the device holds beside weights, KV and experts' pages, by what it is for.

        The largest program's temporaries, the sequences' state, and all that the driver counts
        outside of jax's memory: the context, libraries, CUDA graphs. Empty where nobody counts.
        """
        device = jax.devices()[0]
        used, stats = self._woven.memory.usage().device_used, device.memory_stats()
        if used is None or stats is None:
            return {}
        programs = [found.result() for found in self._compiled.values()]
        pages = self._woven.tensors.pages().created_bytes
        return {
            "temporaries": max(p.memory_analysis().temp_size_in_bytes for p in programs),
            "state": sum(leaf.nbytes for leaf in self._state),
            "outside of jax": used - stats["pool_bytes"] - pages,
        }

    def begin(self, kind: str, bucket: int, groups: int | None = None) -> None:
        """Let a program be compiled; `groups` are the experts in a tensor (None: all there are)."""
        self._program(kind, bucket, groups)

    def runner(self, kind: str, bucket: int, tables: Any, batch: Batch, leaves: Any = None) -> Step:
        """Return a function that enqueues one step and returns the sizes of its groups.

        Other reroute tables than `tables` may be given to it.

        `leaves` None are the plain model's for "base", else the virtual tensors'.
        """
        if leaves is None:
            leaves = self._woven.plain if kind == "base" else self._woven.woven
        groups = max(leaf.shape[0] for leaf in leaves if leaf.ndim == 3)
        program = self._program(kind, bucket, groups).result()
        given = None if kind == "base" else self._place(np.asarray(tables))
        table, blocks = self._place(batch.table), self._place(batch.block_tables)
        sizes = [self._place(np.zeros(groups, np.int32)) for _ in range(self._layers)]

        def step(tables=given):
            nonlocal sizes
            out = program(leaves, self._cache, self._state, sizes, tables, table, blocks)
            self._cache, self._state, sizes = out
            return sizes

        return step

    def _program(self, kind: str, bucket: int, groups: int | None) -> concurrent.futures.Future:
        """Return the program to come; equal ones are compiled once."""
        shape, base = self._shape, self._base_groups
        if groups is None:
            groups = base if kind == "base" else base + shape.extra
        wanted = StepProgram(
            shape.name, self._layers, len(shape.counts), kind, bucket, groups, self.sizes
        )
        if wanted not in self._compiled:
            self._compiled[wanted] = self._pool.submit(compile_apart, wanted, self._ahead)
        return self._compiled[wanted]


def _noise(seed: int, pages: jax.Array) -> jax.Array:
    """Return pages full of random numbers."""
    fill = jax.jit(lambda key: jax.random.normal(key, pages.shape, pages.dtype))
    return fill(jax.random.key(seed, impl="rbg"))
