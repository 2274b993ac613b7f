"""Sorts (token, expert) rows by the matrix they use on a Hopper GPU, by counting: Mosaic kernels.

A piece of 64 rows is compared with itself, which gives each row its rank among its equals there,
and with all groups, which gives its counts; sums over the pieces and groups before it turn those
into places. One launch does it where one CTA has all rows; many take a launch before it that
counts. Looking up an adapter's own experts is part of both. Pallas has no reads and writes at an
address of each row's own: `_gpu_addresses` has them, in MLIR.
"""

import jax.numpy as jnp

from lora_jax.ops import hopper
from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.reroute._gpu_kernels import (
    PIECE,
    RerouteConfig,
    RerouteSizes,
    count_rows,
    place_rows,
)
from lora_jax.ops.reroute.maps import RowMap
from lora_jax.typing import Array, Int

MAX_GROUPS = 1023
MAX_ROWS = 1 << 18
WARPGROUPS, MOST_PIECES = 4, 4  # of a CTA, and of each: more find no registers
CTAS = 128  # beside which no SM has two


def row_map(
    topk_ids: Int[Array, "tokens k"],
    num_tokens: Int[Array, ""],
    num_experts: int,
    adapters: AdapterItems | None = None,
    *,
    config: RerouteConfig | None = None,
    interpret: hopper.Interpret = None,
) -> RowMap:
    """Same result as the reference for rows without adapters.

    `interpret`: see hopper.require. Raises Declined for another machine, adapters, no
    rows or more than 2^18, and more than 1023 groups.
    """
    return _mapped(topk_ids, (), num_tokens, num_experts, adapters, config, interpret)


def reroute(
    topk_ids: Int[Array, "tokens k"],
    token_to_slot: Int[Array, "tokens"],
    table: Int[Array, "slots experts"],
    num_tokens: Int[Array, ""],
    num_groups: int,
    adapters: AdapterItems | None = None,
    *,
    config: RerouteConfig | None = None,
    interpret: hopper.Interpret = None,
) -> RowMap:
    """Same result as the reference for rows without adapters; row_map says what it declines."""
    owners = (token_to_slot, table)
    return _mapped(topk_ids, owners, num_tokens, num_groups, adapters, config, interpret)


def find_config(rows: int) -> RerouteConfig:
    """Return how rows are shared out: by one CTA where it can have all, else a CTA an SM."""
    pieces = -(-rows // PIECE)
    if pieces <= WARPGROUPS * MOST_PIECES:
        return RerouteConfig(min(WARPGROUPS, pieces), -(-pieces // WARPGROUPS))
    wanted = -(-pieces // (WARPGROUPS * CTAS))
    return RerouteConfig(WARPGROUPS, min(wanted, MOST_PIECES))


def _mapped(topk_ids, owners, num_tokens, groups, adapters, config, interpret) -> RowMap:
    tokens, k = topk_ids.shape
    rows = tokens * k
    _require(rows, groups, adapters, interpret)
    config = config or find_config(rows)
    table = owners[1].shape if owners else None
    sizes = RerouteSizes(rows, k, groups, -(-rows // config.rows), table)
    ids = topk_ids.reshape(-1)
    if padding := sizes.ctas * config.rows - rows:
        ids = jnp.pad(ids, (0, padding), constant_values=-1)
    arrays = ids, num_tokens.reshape(1), tuple(a.reshape(-1) for a in owners)
    counts = (count_rows(*arrays, sizes, config, interpret),) if sizes.ctas > 1 else ()
    return RowMap(*place_rows(*arrays, counts, sizes, config, interpret))


def _require(rows: int, groups: int, adapters, interpret: hopper.Interpret) -> None:
    """Raise Declined, saying why, for what the kernels do not serve."""
    hopper.require_device("reroute", interpret)
    if adapters is not None:
        raise Declined("reroute on Mosaic GPU makes no items of adapters")
    if not 1 <= rows <= MAX_ROWS:
        raise Declined(f"reroute on Mosaic GPU takes 1 to {MAX_ROWS} rows, not {rows}")
    if not 1 <= groups <= MAX_GROUPS:
        raise Declined(f"reroute on Mosaic GPU takes 1 to {MAX_GROUPS} groups, not {groups}")
