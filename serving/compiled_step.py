"""The engine's step as compiled programs: one per token bucket, with and without LoRA.

A CUDA graph holds the addresses of its arguments, and XLA writes it anew when one of them changes,
which takes the host longer than a small step takes the device. So on accelerators the step reads
and writes the same memory every time: the host's tables are copied into arrays that stay, and
results are copied out of arrays that stay.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.kv_cache import PagedKVCache
from lora_jax.typing import Array, Int
from serving.device_state import RowState
from serving.lora_server.client import RemoteTable, ServerLink
from serving.sampler import Sampled, no_samples
from serving.step import TABLE_ROWS, StepSizes, run_step

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
        stay: bool,
        compiler_options: dict[str, str] | None = None,
    ):
        """`stay` keeps tables and results at their addresses; see the module."""
        self._sizes, self._vocab_size = sizes, vocab_size
        self._step, self._leaves = _jitted(model, sizes, link, compiler_options)
        self.sharding = self._leaves[0].sharding
        self._stay = stay
        self._table = self._place(np.zeros((TABLE_ROWS, sizes.max_seqs), np.int32))
        self._pages = self._place(np.zeros((sizes.max_seqs, sizes.max_pages), np.int32))
        self._results: dict[int, Sampled] = {}  # by number of logit rows

    def set_pages(self, tables: np.ndarray) -> None:
        """Use these block tables, int32 [seqs, max_pages], from the next step on."""
        if self._stay:
            self._pages = _overwrite(self._pages, tables.copy())
        else:
            self._pages = self._place(tables.copy())

    def run(
        self,
        cache: PagedKVCache,
        state: RowState,
        slots: AdapterSlots | None,
        reroute_tables: Int[Array, "moe_layers esft_slots experts"] | None,
        remote_table: RemoteTable | None,
        table: np.ndarray,
        bucket: int,
        lora: bool,
    ) -> tuple[PagedKVCache, RowState, Sampled, jax.Array | None]:
        """Return cache and state (both donated) after the step, its samples and servers' status."""
        args = (self._leaves, cache, state)
        adapters = (slots, reroute_tables, remote_table)
        fixed = {"bucket": bucket, "lora": lora}
        if not self._stay:
            return self._step(*args, None, *adapters, table, self._pages, **fixed)
        self._table = _overwrite(self._table, table)
        rows = self._sizes.logit_rows(bucket)
        if rows not in self._results:
            self._results[rows] = jax.tree.map(self._place, no_samples(rows, self._vocab_size))
        cache, state, self._results[rows], status = self._step(
            *args, self._results[rows], *adapters, self._table, self._pages, **fixed
        )
        return cache, state, _copied(self._results[rows]), status

    def _place(self, value: Any) -> jax.Array:
        return jax.device_put(value, self.sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _overwrite(old: Int[Array, "*shape"], new: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return `new` in the memory of `old`."""
    return old.at[...].set(new)


@jax.jit
def _copied(values: Sampled) -> Sampled:
    return jax.tree.map(jnp.copy, values)


def _jitted(
    model: nnx.Module,
    sizes: StepSizes,
    link: ServerLink | None,
    options: dict[str, str] | None,
) -> tuple[Any, tuple[jax.Array, ...]]:
    """Return the jitted step over (leaves, cache, state, ...) and the leaves of the model."""
    graphdef, params = nnx.split(model, graph=False)
    leaves, treedef = jax.tree.flatten(params)

    @functools.partial(
        jax.jit,
        static_argnames=("bucket", "lora"),
        donate_argnums=(1, 2, 3),
        keep_unused=True,
        compiler_options=options,
    )
    def step(
        leaves,
        cache,
        state,
        results,  # only their memory is used, for the new ones
        slots,
        tables,
        remote_table,
        table,
        block_tables,
        *,
        bucket,
        lora,
    ):
        merged = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        remote = None if link is None else link.start(remote_table)
        out = run_step(
            merged, cache, state, slots, table, block_tables, bucket, sizes, tables, remote, lora
        )
        return *out, None if remote is None else remote.status()

    return step, tuple(leaves)
