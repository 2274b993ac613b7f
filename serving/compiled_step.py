"""The engine's step as compiled programs: one per token bucket, with and without LoRA.

On a CPU forward and sampling are one program. On accelerators they are two, because the host knows
which sampler the batch needs, and a CUDA graph that holds them all is long. A graph holds addresses
as well, and XLA writes it anew when one of them changes, which takes the host longer than a small
step takes the device; so there the programs read and write the same memory every time: the host's
tables are copied into arrays that stay, and results are copied out of arrays that stay.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.kv_cache import PagedKVCache
from lora_jax.typing import Array, Float, Int
from serving import batch_sampler, sampler
from serving.device_state import RowState
from serving.lora_server.client import RemoteTable, ServerLink
from serving.sampler import Sampled, no_samples
from serving.step import (
    TABLE_ROWS,
    LogitRows,
    StepSizes,
    forward_step,
    no_logit_rows,
    sample_step,
)

_HOLE_BYTES = (1 << 9, 1 << 12, 1 << 15, 1 << 18)
_HOLES = 32  # of each size

Logits = tuple[Float[Array, "rows vocab"], LogitRows]

# XLA takes the addresses of expert tensors for memory, finds more of it than there is, and would
# compute many things twice to save some. It still says once that the arguments exceed its limit.
NO_REMAT = {"xla_disable_hlo_passes": "rematerialization"}


class CompiledStep:
    """Runs steps of one model; the runner's thread uses it."""

    def __init__(
        self,
        model: nnx.Module,
        sizes: StepSizes,
        link: ServerLink | None,
        vocab_size: int,
        *,
        split: bool,
        compiler_options: dict[str, str] | None = None,
    ):
        """`split` makes two programs, whose memory stays where it is; see the module."""
        self._sizes, self._vocab_size, self._split = sizes, vocab_size, split
        forward, self._leaves = _forward(model, sizes, link)
        self._whole = _jit_whole(forward, compiler_options)
        self._forward = _jit_forward(forward, compiler_options)
        self.sharding = self._leaves[0].sharding
        self._table = self._place(np.zeros((TABLE_ROWS, sizes.max_seqs), np.int32))
        self._pages = self._place(np.zeros((sizes.max_seqs, sizes.max_pages), np.int32))
        self._spacers = _make_holes(self._place) if split else []
        self._logits: dict[int, Logits] = {}  # by number of logit rows, as are the results
        self._results: dict[int, Sampled] = {}

    @property
    def samplers(self) -> tuple[bool, ...]:
        """The values of `plain` for which `run` has programs of its own."""
        return (True, False) if self._split else (False,)

    def set_pages(self, tables: np.ndarray) -> None:
        """Use these block tables, int32 [seqs, max_pages], from the next step on."""
        new = tables.copy()
        self._pages = _overwrite(self._pages, new) if self._split else self._place(new)

    def run(
        self,
        cache: PagedKVCache,
        state: RowState,
        slots: AdapterSlots | None,
        reroute_tables: Int[Array, "moe_layers esft_slots experts"] | None,
        remote_table: RemoteTable | None,
        table: np.ndarray,
        bucket: int,
        *,
        lora: bool,
        plain: bool,
    ) -> tuple[PagedKVCache, RowState, Sampled, jax.Array | None]:
        """Return cache and state (both donated) after the step, its samples and servers' status.

        `plain` promises that every row wants the most likely token and no scores.
        """
        adapters = (slots, reroute_tables, remote_table)
        fixed = {"bucket": bucket, "lora": lora}
        if not self._split:
            return self._whole(self._leaves, cache, state, *adapters, table, self._pages, **fixed)
        self._table = _overwrite(self._table, table)
        rows = self._sizes.logit_rows(bucket)
        if rows not in self._logits:
            self._make_room(rows)
        cache, self._logits[rows], status = self._forward(
            self._leaves,
            cache,
            self._logits[rows],
            state.history,
            *adapters,
            self._table,
            self._pages,
            **fixed,
        )
        state, self._results[rows] = _sample(state, self._results[rows], self._logits[rows], plain)
        return cache, state, _copied(self._results[rows]), status

    def _make_room(self, rows: int) -> None:
        logits = jnp.zeros((rows, self._vocab_size), jnp.float32)
        made = (logits, no_logit_rows(rows)), no_samples(rows, self._vocab_size)
        self._logits[rows], self._results[rows] = jax.tree.map(self._place, made)

    def _place(self, value: Any) -> jax.Array:
        return jax.device_put(value, self.sharding)


def _forward(
    model: nnx.Module, sizes: StepSizes, link: ServerLink | None
) -> tuple[Callable, tuple[jax.Array, ...]]:
    """Return forward_step over the leaves of the model, and the leaves."""
    graphdef, params = nnx.split(model, graph=False)
    leaves, treedef = jax.tree.flatten(params)

    def forward(leaves, cache, history, adapters, table, pages, bucket, lora):
        merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        slots, reroute_tables, remote_table = adapters
        remote = None if link is None or not lora else link.start(remote_table)
        cache, *logits = forward_step(
            merged,
            cache,
            history,
            slots,
            table,
            pages,
            bucket,
            sizes,
            reroute_tables,
            remote,
            lora,
        )
        return cache, tuple(logits), None if remote is None else remote.status()

    return forward, tuple(leaves)


def _jit_whole(forward: Callable, options: dict[str, str] | None) -> Callable:
    @functools.partial(
        jax.jit,
        static_argnames=("bucket", "lora"),
        donate_argnums=(1, 2),
        compiler_options=options,
    )
    def step(leaves, cache, state, slots, tables, remote, table, pages, *, bucket, lora):
        adapters = (slots, tables, remote)
        cache, (logits, rows), status = forward(
            leaves, cache, state.history, adapters, table, pages, bucket, lora
        )
        return cache, *sample_step(logits, rows, state, sampler.sample), status

    return step


def _jit_forward(forward: Callable, options: dict[str, str] | None) -> Callable:
    """Return the first program; of the logits that it is given, only the memory is used."""

    @functools.partial(
        jax.jit,
        static_argnames=("bucket", "lora"),
        donate_argnums=(1, 2),
        keep_unused=True,
        compiler_options=options,
    )
    def step(leaves, cache, logits, history, slots, tables, remote, table, pages, *, bucket, lora):
        adapters = (slots, tables, remote)
        return forward(leaves, cache, history, adapters, table, pages, bucket, lora)

    return step


@functools.partial(jax.jit, static_argnames="plain", donate_argnums=(0, 1), keep_unused=True)
def _sample(
    state: RowState, results: Sampled, logits: Logits, plain: bool
) -> tuple[RowState, Sampled]:
    """Return the second program's state and results, in the memory of those given."""
    sample = batch_sampler.sample_plain if plain else batch_sampler.sample
    return sample_step(*logits, state, sample)


def _make_holes(place: Callable[[Any], jax.Array]) -> list[jax.Array]:
    """Leave free places for small arrays, kept apart by the arrays returned.

    Otherwise the allocator cuts them from the front of the memory that programs take for their
    temporaries, which then lie elsewhere in every step.
    """
    made = [place(np.zeros(size, np.uint8)) for _ in range(_HOLES) for size in _HOLE_BYTES * 2]
    jax.block_until_ready(made)
    step = len(_HOLE_BYTES)
    return [array for i, array in enumerate(made) if i // step % 2]


@functools.partial(jax.jit, donate_argnums=0)
def _overwrite(old: Int[Array, "*shape"], new: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return `new` in the memory of `old`."""
    return old.at[...].set(new)


@jax.jit
def _copied(values: Sampled) -> Sampled:
    return jax.tree.map(jnp.copy, values)
