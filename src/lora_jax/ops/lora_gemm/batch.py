"""The rows, pools and tables of a LoRA product: the argument of every implementation."""

import dataclasses

import jax
import jax.numpy as jnp

from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraBatch:
    """Rows that each use an adapter slot, and where the slots' rank rows lie.

    Columns of `entries`: a_offset, b_offset, rank, a_stride, b_stride; expert e's rows start at
    offset + e * stride of its pool. No rank exceeds `max_rank`. The tables are of one site, or of
    all sites of a model, which then is their first axis.
    """

    x: Float[Array, "rows d_in"]
    a_pool: Float[Array, "a_rows d_in"]
    b_pool: Float[Array, "b_rows d_out"]
    entries: Int[Array, "*sites slots 5"]
    scaling: Float[Array, "*sites slots"]
    row_to_slot: Int[Array, "rows"]  # -1: no adapter
    row_to_expert: Int[Array, "rows"]
    max_rank: int = dataclasses.field(metadata={"static": True})
    items: AdapterItems | None = None  # of the rows, if known: a kernel need not make them

    def at(self, site: int | None) -> "LoraBatch":
        """Return the batch with the tables of one site; None: they are of one already."""
        if site is None:
            return self
        return dataclasses.replace(self, entries=self.entries[site], scaling=self.scaling[site])

    def zeros(self, dtype: jnp.dtype | None = None) -> Float[Array, "rows d_out"]:
        """Return zeros to add to, of x's dtype by default."""
        return jnp.zeros((self.x.shape[0], self.b_pool.shape[1]), dtype or self.x.dtype)
