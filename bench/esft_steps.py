"""Steps of a model with several ESFT adapters: their inputs and times."""

import concurrent.futures
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.esft_model import MultiEsftModel, Shape
from bench.esft_programs import PAGE, StepProgram, compile_apart, register_kernels
from bench.step_profile import profile_in_turn
from lora_jax.config import from_hf
from lora_jax.kv_cache import init_cache
from serving.steps.device_state import init_row_state
from serving.steps.step import NUM_TOKENS, SAMPLES, SLOT, START, TABLE_ROWS, StepSizes

WORKERS = 10  # programs that are compiled at a time
SAMPLE_S = 0.06  # of steps one after another: short, so that few samples see a late host
SAMPLES_TAKEN, FEWEST = 21, 5
TURNS_S = 1.5  # that the samples of one step may take, unless they are the fewest
PROFILES = 2
_UNCOUNTED = 2  # steps at the start of a sample


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
        text = f"{self.name:52} {self.us:9.1f} us"
        if self.base_us is not None:
            text += f"  base {self.base_us:9.1f} us  {100 * (self.us / self.base_us - 1):+6.2f}%"
        if self.floor_us is not None and self.base_floor_us is not None:
            floors = 100 * (self.floor_us / self.base_floor_us - 1)
            text += f"  floor {self.floor_us:8.1f} us ({floors:+.1f}%)"
            text += f"  experts {self.experts:.0f} / {self.base_experts:.0f}"
        return text + "".join(f"  {name} {value:.4g}" for name, value in self.more.items())

    def as_json(self) -> dict[str, Any]:
        """Return the row for a result file."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Inputs of one step: the runner's table and block tables."""

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
    """Microseconds of one step, turn by turn, and the distinct experts it touched.

    `clock` is from the end of one step to the end of the next, which was on its way by then: what a
    token takes. `kernels` is the sum of its kernels by the profiler, empty on a CPU: it differs by
    0.1% or so from turn to turn, and says nothing of what lies between kernels.
    """

    clock: list[float]
    kernels: list[float]
    experts: float  # in all layers together
    dispatch_us: float  # of the host, for one step

    @property
    def us(self) -> float:
        return statistics.median(self.clock)

    def over(self, base: "Took") -> dict[str, float]:
        """Return by how many percent it takes longer by the clock and by kernels.

        Medians over pairs, and the middle half of the clock's.
        """
        clock = _over(self.clock, base.clock)
        low, middle, high = np.percentile(clock, (25, 50, 75)).tolist()
        results = {"over %": middle, "low %": low, "high %": high}
        if self.kernels and base.kernels:
            kernels = _over(self.kernels, base.kernels)
            results |= {
                "kernels over %": statistics.median(kernels),
                "kernels us": statistics.median(self.kernels),
                "base kernels us": statistics.median(base.kernels),
            }
        return results


def _over(mine: list[float], its: list[float]) -> list[float]:
    return [100 * (one / other - 1) for one, other in zip(mine, its, strict=True)]


def in_turn(
    steps: dict[str, Step], samples: int = SAMPLES_TAKEN, profiles: int = PROFILES
) -> dict[str, Took]:
    """Return what each step takes, a sample of each in turn, so that drift counts for all alike.

    At most so many samples, fewer of long steps.
    """
    experts, calls, seconds = {}, {}, 0.0
    for name, step in steps.items():
        sizes = jax.block_until_ready(step())
        experts[name] = float(sum(np.count_nonzero(np.asarray(s)) for s in sizes))
        one = _sample(step, 2)[0] / 1e6
        calls[name] = max(2, round(SAMPLE_S / one))
        seconds = max(seconds, (calls[name] + _UNCOUNTED + 1) * one)
    turns = min(samples, max(FEWEST, round(TURNS_S / seconds)))
    clock = _by_clock(steps, calls, turns)
    profiled = profile_in_turn(steps, profiles) if profiles else {}
    took = {}
    for name in steps:
        by_clock, sent = zip(*clock[name], strict=True)
        sums = [sum(us for _, us in kernels.values()) for kernels in profiled.get(name, [])]
        kernels = sums if all(sums) else []
        took[name] = Took(list(by_clock), kernels, experts[name], statistics.median(sent))
    return took


def _by_clock(
    steps: dict[str, Step], calls: dict[str, int], turns: int
) -> dict[str, list[tuple[float, float]]]:
    """Return the samples of each step, every second turn backwards.

    Python collects no garbage meanwhile: that stops the host for longer than a step takes.
    """
    results = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    try:
        for turn in range(turns):
            for name in list(steps)[:: -1 if turn % 2 else 1]:
                results[name].append(_sample(steps[name], calls[name]))
    finally:
        gc.enable()
    return results


def _sample(step: Step, steps: int) -> tuple[float, float]:
    """Return microseconds from a step's end to the next's, and of the host to send one.

    As in an engine, the next one is sent before the host waits for the last. The first ones do not
    count: XLA writes a CUDA graph anew when its arguments lie elsewhere than in the run before, as
    those of two steps of one program do.
    """
    ends, sent = [], 0.0
    coming = step()[0]
    watched = [_overwrite(jnp.zeros_like(coming), coming) for _ in range(2)]
    for n in range(_UNCOUNTED + steps + 1):
        begun = time.perf_counter()
        watched[n % 2] = _overwrite(watched[n % 2], step()[0])
        sent += time.perf_counter() - begun
        watched[(n + 1) % 2].block_until_ready()
        ends.append(time.perf_counter())
    counted = ends[-1] - ends[_UNCOUNTED]
    return counted / steps * 1e6, sent / len(ends) * 1e6


@functools.partial(jax.jit, donate_argnums=0)
def _overwrite(old: jax.Array, new: jax.Array) -> jax.Array:
    """Return `new` in the memory of `old`: it can be waited for when the next step has taken it."""
    return old.at[...].set(new)


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

    def attach(self, multi_esft: MultiEsftModel) -> None:
        """Make what the steps of a model need beside its weights."""
        self._multi_esft, kv = multi_esft, multi_esft.model.kv_shape(multi_esft.config)
        dtype = multi_esft.model.embed.weight[...].dtype
        self.kv_token_bytes = kv.bytes_per_token(dtype)
        self._place = functools.partial(jax.device_put, device=multi_esft.plain[0].sharding)
        cache = jax.tree.leaves(init_cache(kv, self.sizes.num_pages, PAGE, dtype))
        self._cache = [_noise(n, pages) for n, pages in enumerate(cache)]
        state = init_row_state(self.sizes.max_seqs, self.sizes.max_len)
        shape, vocab = state.history.shape, multi_esft.config.vocab_size
        history = np.random.default_rng(0).integers(3, vocab, shape).astype(np.int32)
        state = dataclasses.replace(state, history=jnp.asarray(history))
        self._state = self._place(jax.tree.leaves(state))

    def beside_bytes(self) -> dict[str, int]:
        """Return what the device holds beside weights, KV and experts' pages, by what it is for.

        The largest program's temporaries, the sequences' state, and all that the driver counts
        outside of jax's memory: the context, libraries, CUDA graphs. Empty where nobody counts.
        """
        device = jax.devices()[0]
        used, stats = self._multi_esft.memory.usage().device_used, device.memory_stats()
        if used is None or stats is None:
            return {}
        programs = [results.result() for results in self._compiled.values()]
        pages = self._multi_esft.tensors.pages().created_bytes
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
            leaves = self._multi_esft.plain if kind == "base" else self._multi_esft.virtual
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
