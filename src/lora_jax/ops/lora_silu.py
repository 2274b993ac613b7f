"""The gated activation between the maps of an MLP, with every row's adapter at the first two."""

from collections.abc import Sequence

import jax.numpy as jnp

from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.dispatch import ANY, COMPOSED, GPU, Implementation, Op, backend_kernel
from lora_jax.ops.lora_gemm import LoraBatch, check_maps, lora_gemms
from lora_jax.ops.silu_times import silu_times
from lora_jax.typing import Array, Float, Int, Num

__all__ = ["lora_silu_times"]


def _composed(
    gate: Float[Array, "rows width"],
    up: Float[Array, "rows width"],
    num_rows: Int[Array, ""],
    batch: LoraBatch,
    sites: tuple[int, int],
) -> Float[Array, "rows width"]:
    """Return the op by its parts."""
    pools, tables = (batch.a_pool, batch.b_pool), (batch.entries, batch.scaling)
    owners = batch.row_to_slot, batch.row_to_expert
    options = {"max_rank": batch.max_rank, "items": batch.items}
    gate, up = lora_gemms((gate, up), batch.x, *pools, *tables, sites, *owners, **options)
    return silu_times(gate, up, num_rows)


LORA_SILU_TIMES = Op(
    "lora_silu_times",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "lora_silu_times")),
        Implementation(COMPOSED, ANY, _composed, stands_in=True),
    ),
)


def lora_silu_times(
    gate: Float[Array, "rows width"],
    up: Float[Array, "rows width"],
    num_rows: Int[Array, ""],
    x: Float[Array, "rows d_in"],
    a_pool: Num[Array, "a_rows a_items"],
    b_pool: Num[Array, "b_rows b_items"],
    entries: Int[Array, "sites slots 5"],
    scaling: Float[Array, "sites slots"],
    sites: Sequence[int],
    row_to_slot: Int[Array, "rows"],
    *,
    max_rank: int,
    items: AdapterItems | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows width"]:
    """Return `silu_times` of what `lora_gemms` gives for gate and up: the same bits.

    On Hopper few rows of few adapters are one launch, which writes neither sum; others, and all on
    other devices, are the two ops. `sites` are gate's and up's of the table. Rows at or after
    num_rows, an int32, whose gate and up must be 0 and whose slot -1, are 0. Raises ValueError
    where up has not gate's shape or where there are not two sites; other arguments are those of
    `lora_gemms`.
    """
    if up.shape != gate.shape or len(sites) != 2:
        raise ValueError(
            f"lora_silu_times: up {tuple(up.shape)} must have gate's shape {tuple(gate.shape)}, "
            f"and sites {tuple(sites)} be two of the table"
        )
    owners = row_to_slot, jnp.zeros(x.shape[:1], jnp.int32)
    batch = LoraBatch(x, a_pool, b_pool, entries, scaling, *owners, max_rank, items)
    check_maps((gate, up), batch, sites)
    return LORA_SILU_TIMES.call(implementation, gate, up, num_rows, batch, tuple(sites))
