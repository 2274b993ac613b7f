"""Adapter slots on the device: pools of rank rows and one table that says who owns which rows.

A rank-r matrix is r rows: A [r, d_in] is r rows of width d_in, and B is kept transposed as r rows
of width d_out. All rows of one width, of every module, layer and adapter, live in one pool, so an
adapter takes exactly the rows its true ranks need (S-LoRA's unified pool of rank vectors).
`AdapterTable` maps (module, layer, slot) to rows. The step reads both; loading returns new ones
and donates the old.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.typing import Array, Float, Int

# Columns of AdapterTable.entries.
A_OFFSET, B_OFFSET, RANK, A_STRIDE, B_STRIDE = range(5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdapterSlots:
    """Every resident adapter.

    Expert e of a site uses rows [a_offset + e * a_stride, + rank) of pools[d_in] and
    [b_offset + e * b_stride, + rank) of pools[d_out]; a stride of 0 shares one matrix between all
    experts. Rank 0 means the slot does not touch the site. `scaling` is alpha / rank (or
    alpha / sqrt(rank)).
    """

    pools: dict[str, Float[Array, "rows width"]]  # key: str(width)
    entries: Int[Array, "modules layers slots 5"]  # modules in the order of catalogue.module_names
    scaling: Float[Array, "modules layers slots"]

    @property
    def num_slots(self) -> int:
        return self.entries.shape[2]


@dataclasses.dataclass(frozen=True)
class SlotsSpec:
    """Sizes of the slots: how many adapters, and how many rank rows of each width."""

    num_slots: int
    rows: dict[int, int]


def init_slots(catalogue: LoraCatalogue, spec: SlotsSpec, dtype: jnp.dtype) -> AdapterSlots:
    """Return empty slots: no adapter anywhere."""
    shape = (len(catalogue.modules), catalogue.num_layers, spec.num_slots)
    return AdapterSlots(
        pools={str(w): jnp.zeros((n, w), dtype) for w, n in sorted(spec.rows.items())},
        entries=jnp.zeros((*shape, 5), jnp.int32),
        scaling=jnp.zeros(shape, jnp.float32),
    )


@functools.partial(jax.jit, donate_argnums=0)
def write_rows(
    pool: Float[Array, "rows width"],
    indices: Int[Array, "chunk"],
    values: Float[Array, "chunk width"],
) -> Float[Array, "rows width"]:
    """Return the pool with values[i] at row indices[i]; an index out of range is dropped.

    The chunk is padded to one fixed length, so that loading never compiles after warm-up.
    """
    return pool.at[indices].set(values, mode="drop", unique_indices=True)


@functools.partial(jax.jit, donate_argnums=(0, 1))
def write_slot(
    entries: Int[Array, "modules layers slots 5"],
    scaling: Float[Array, "modules layers slots"],
    slot: Int[Array, ""],
    slot_entries: Int[Array, "modules layers 5"],
    slot_scaling: Float[Array, "modules layers"],
) -> tuple[Int[Array, "modules layers slots 5"], Float[Array, "modules layers slots"]]:
    """Return the table with one slot overwritten; zeros empty it."""
    return entries.at[:, :, slot].set(slot_entries), scaling.at[:, :, slot].set(slot_scaling)
