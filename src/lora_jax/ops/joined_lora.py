"""Adds every row's own adapter to maps of one x whose widths differ."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.dispatch import ANY, COMPOSED, GPU, Implementation, Op, backend_kernel
from lora_jax.ops.lora_gemm import LoraBatch, check_maps, lora_gemms
from lora_jax.typing import Array, Float, Int, Num

__all__ = ["joined_lora"]

_Ys = Sequence[Float[Array, "rows _"]]
_Pools = Sequence[Num[Array, "b_rows _"]]


def _composed(ys: _Ys, b_pools: _Pools, batch: LoraBatch, sites: tuple[int, ...]) -> tuple:
    """Return the op by a call for each width."""
    added = list(ys)
    tables, owners = (batch.entries, batch.scaling), (batch.row_to_slot, batch.row_to_expert)
    options = {"max_rank": batch.max_rank, "items": batch.items}
    for width in dict.fromkeys(y.shape[1] for y in ys):
        of_width = [i for i, y in enumerate(ys) if y.shape[1] == width]
        pools, places = (batch.a_pool, b_pools[of_width[0]]), [sites[i] for i in of_width]
        given = [ys[i] for i in of_width]
        done = lora_gemms(given, batch.x, *pools, *tables, places, *owners, **options)
        for i, y in zip(of_width, done, strict=True):
            added[i] = y
    return tuple(added)


JOINED_LORA = Op(
    "joined_lora",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "joined_lora")),
        Implementation(COMPOSED, ANY, _composed, stands_in=True),
    ),
)


def joined_lora(
    ys: _Ys,
    x: Float[Array, "rows d_in"],
    a_pool: Num[Array, "a_rows a_items"],
    b_pools: _Pools,
    entries: Int[Array, "sites slots 5"],
    scaling: Float[Array, "sites slots"],
    sites: Sequence[int],
    row_to_slot: Int[Array, "rows"],
    *,
    max_rank: int,
    items: AdapterItems | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows _"], ...]:
    """Return `lora_gemms` of maps of several widths, each with its pool of B: the same bits.

    On Hopper few rows of few adapters are one launch; others, and all on other devices, are a call
    for each width. Maps of one width have one pool. Works in place where ys are temporaries. Raises
    ValueError where there are not as many pools and sites as ys; other arguments are those of
    `lora_gemms`.
    """
    if not len(ys) == len(b_pools) == len(sites):
        raise ValueError(
            f"joined_lora: each map needs a pool of B and a site, got {len(ys)} y, "
            f"{len(b_pools)} pools and sites {tuple(sites)}"
        )
    owners = row_to_slot, jnp.zeros(x.shape[:1], jnp.int32)
    batch = LoraBatch(x, a_pool, b_pools[0], entries, scaling, *owners, max_rank, items)
    for y, b_pool, site in zip(ys, b_pools, sites, strict=True):
        check_maps([y], dataclasses.replace(batch, b_pool=b_pool), [site])
    return JOINED_LORA.call(implementation, tuple(ys), tuple(b_pools), batch, tuple(sites))
