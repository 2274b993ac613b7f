"""The rows, pools and tables of a LoRA product: the argument of every implementation."""

import dataclasses

import jax
import jax.numpy as jnp

from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.rank_rows import SCALE_BYTES, TAIL_BYTES, value_width
from lora_jax.typing import Array, Float, Int, Num


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoraBatch:
    """Rows that each use an adapter slot, and where the slots' rank rows lie.

    Columns of `entries`: a_offset, b_offset, rank, a_stride, b_stride; expert e's rows start at
    offset + e * stride of its pool. Pools of int8 hold rows in 8 bits (lora_jax.rank_rows), with
    the scale in a tail: their items are the width and 16 more. No rank exceeds `max_rank`.
    The tables are of one site, or of all sites of a model, which then is their first axis.
    """

    x: Float[Array, "rows d_in"]
    a_pool: Num[Array, "a_rows a_items"]
    b_pool: Num[Array, "b_rows b_items"]
    entries: Int[Array, "*sites slots 5"]
    scaling: Float[Array, "*sites slots"]
    row_to_slot: Int[Array, "rows"]  # -1: no adapter
    row_to_expert: Int[Array, "rows"]
    max_rank: int = dataclasses.field(metadata={"static": True})
    items: AdapterItems | None = None  # of the rows, if known: a kernel need not make them

    @property
    def has_int8_rows(self) -> bool:
        """True if the pools hold rows in 8 bits."""
        return self.a_pool.dtype == jnp.int8

    @property
    def d_out(self) -> int:
        """Values of a row of B."""
        return value_width(self.b_pool.shape[1], self.b_pool.dtype)

    def at(self, site: int | None) -> "LoraBatch":
        """Return the batch with the tables of one site; None: they are of one already."""
        if site is None:
            return self
        return dataclasses.replace(self, entries=self.entries[site], scaling=self.scaling[site])

    def zeros(self, dtype: jnp.dtype | None = None) -> Float[Array, "rows d_out"]:
        """Return zeros to add to, of x's dtype by default."""
        return jnp.zeros((self.x.shape[0], self.d_out), dtype or self.x.dtype)


def float_rows(rows: Num[Array, "*lead items"]) -> Float[Array, "*lead width"]:
    """Return rank rows of a pool in float32: those in 8 bits times their scale."""
    if rows.dtype != jnp.int8:
        return rows.astype(jnp.float32)
    scale = slice(-TAIL_BYTES, SCALE_BYTES - TAIL_BYTES)
    scales = jax.lax.bitcast_convert_type(rows[..., scale], jnp.float32)
    return rows[..., :-TAIL_BYTES].astype(jnp.float32) * scales[..., None]
