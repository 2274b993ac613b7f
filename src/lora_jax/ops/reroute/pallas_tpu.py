"""Sorts (token, expert) rows by group on a TPU: a counting sort by one-hot products in one kernel.

All rows are in VMEM, 256 a block, and two loops go over the blocks. The first looks up every row's
group and counts. In the second a row's place is its group's base, plus the rows of the group in
blocks before, plus those before it in its own block, which is the one-hot matrix of groups times a
triangle of ones. The inverse of the places is a product of two one-hot matrices, of place // 128
and of place % 128, the latter with the rows' numbers for ones. These are sums of whole numbers that
bfloat16 operands and float32 sums hold exactly; there is no sort, gather or scatter in it.

Of N rows in G groups a block costs G * 256^2 and N * 256 multiplications of one pass of the MXU,
and S * E * 256 of six for a table of S slots and E experts. In the schedule for v5e a block takes
390 cycles for 128 groups, 950 for 512, and 117 more for each 16384 of N: 80,000 for 32768 rows of
128 groups, 50 us, but 1,300 for 512 rows. These are counted in the compiled program, not timed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lora_jax.ops.adapter_items import AdapterItems
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.reroute.maps import RowMap, with_owners
from lora_jax.typing import Array, Float, Int

LANES = 128
BLOCK = 256  # rows of a block: their numbers from 1 on are exact in bfloat16
TILE = 16  # sublanes of a bfloat16 tile
ORDER_BLOCK = 128  # times 128 places that one product finds the rows of
MAX_ROWS = 1 << 17
MAX_GROUPS = 512
MAX_TABLE = 1 << 18  # entries of a table in VMEM, padded


@dataclasses.dataclass(frozen=True)
class _RerouteSizes:
    """Static sizes of one call."""

    rows: int
    experts: int  # ids of experts that there are
    groups: int
    slots: int  # of the table; 0: there is none

    @property
    def blocks(self) -> int:
        return pl.cdiv(self.rows, BLOCK)

    @property
    def keys(self) -> int:
        """Groups and the one of rows in none, in whole tiles."""
        return _round_up(self.groups + 1, TILE)

    @property
    def order_block(self) -> int:
        return min(ORDER_BLOCK, _round_up(self.blocks * BLOCK // LANES, TILE))

    @property
    def order_rows(self) -> int:
        """Rows of 128 places each, as many as whole blocks of them have."""
        return _round_up(self.blocks * BLOCK // LANES, self.order_block)

    @property
    def table(self) -> tuple[int, int]:
        """The table's shape in whole tiles."""
        return _round_up(self.slots, TILE), _round_up(self.experts, LANES)


def row_map(
    topk_ids: Int[Array, "tokens k"],
    num_tokens: Int[Array, ""],
    num_experts: int,
    adapters: AdapterItems | None = None,
    *,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> RowMap:
    """Same result as the reference.

    `interpret` None runs on a TPU only; parameters run the kernel interpreted on any device, and
    False compiles it for the target at hand.

    Raises:
        Declined: not on a TPU; adapters, of which no TPU kernel wants items; no rows,
            or more rows or groups than the kernel takes.
    """
    sizes = _RerouteSizes(topk_ids.size, num_experts, num_experts, slots=0)
    _require("row_map", sizes, adapters, interpret)
    return _sorted("row_map", topk_ids, [], [], num_tokens, sizes, interpret or False)


def reroute(
    topk_ids: Int[Array, "tokens k"],
    token_to_slot: Int[Array, "tokens"],
    table: Int[Array, "slots experts"],
    num_tokens: Int[Array, ""],
    num_groups: int,
    adapters: AdapterItems | None = None,
    *,
    interpret: pltpu.InterpretParams | bool | None = None,
) -> RowMap:
    """Same result as the reference; `interpret` and errors as in row_map, and for a large table."""
    slots, experts = table.shape
    sizes = _RerouteSizes(topk_ids.size, experts, num_groups, slots)
    _require("reroute", sizes, adapters, interpret)
    # Whatever is no group is -1 or num_groups, so that all entries are exact in float32.
    entries = jnp.clip(table, -1, num_groups).astype(jnp.float32)
    pad = [(0, whole - size) for whole, size in zip(sizes.table, table.shape, strict=True)]
    by_row = jnp.broadcast_to(token_to_slot[:, None], topk_ids.shape)
    tables = [jnp.pad(entries, pad)]
    return _sorted("reroute", topk_ids, [by_row], tables, num_tokens, sizes, interpret or False)


def _require(
    op: str,
    sizes: _RerouteSizes,
    adapters: AdapterItems | None,
    interpret: pltpu.InterpretParams | bool | None,
) -> None:
    """Raise Declined, saying why, for what the kernel does not serve."""
    if interpret is None and jax.default_backend() != "tpu":
        raise Declined(f"{op}: the TPU kernel runs on a TPU only")
    if adapters is not None:
        raise Declined(f"{op}: the TPU kernel makes no items of adapters")
    if not 0 < sizes.rows <= MAX_ROWS or sizes.groups > MAX_GROUPS:
        raise Declined(
            f"{op}: {sizes.rows} rows in {sizes.groups} groups; the TPU kernel takes 1 to "
            f"{MAX_ROWS} rows in up to {MAX_GROUPS} groups"
        )
    if sizes.table[0] * sizes.table[1] > MAX_TABLE:
        raise Declined(
            f"{op}: a table of {sizes.slots} slots and {sizes.experts} experts; in tiles the TPU "
            f"kernel takes {MAX_TABLE} entries"
        )


def _sorted(
    op: str,
    topk_ids: Int[Array, "tokens k"],
    slots: list[Int[Array, "tokens k"]],
    tables: list[Float[Array, "slots experts"]],
    num_tokens: Int[Array, ""],
    sizes: _RerouteSizes,
    interpret: pltpu.InterpretParams | bool,
) -> RowMap:
    """Return the map of rows by group; there are slots and a table, or neither."""
    tokens, k = topk_ids.shape
    real = jnp.clip(num_tokens, 0, tokens) * k
    pad = (0, sizes.blocks * BLOCK - sizes.rows)
    blocks = [jnp.pad(a.reshape(-1), pad).reshape(-1, BLOCK) for a in (topk_ids, *slots)]
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    shapes = ((sizes.blocks, BLOCK), (sizes.order_rows, LANES), (1, _round_up(sizes.keys, LANES)))
    vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    inverse, order, counts = pl.pallas_call(
        functools.partial(_reroute_kernel, sizes),
        out_shape=tuple(map(i32, shapes)),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *[vmem] * (len(blocks) + len(tables))],
        out_specs=(vmem,) * 3,
        scratch_shapes=[pltpu.VMEM((sizes.keys, 1), jnp.float32)],
        interpret=interpret,
        name=op,
    )(real.reshape(1), *blocks, *tables)
    order, inverse = (a.reshape(-1)[: sizes.rows] for a in (order, inverse))
    return with_owners(topk_ids, order, inverse, counts[0, : sizes.groups])


def _reroute_kernel(sizes: _RerouteSizes, real_ref, ids_ref, *refs):
    *lookup, places_ref, order_ref, sizes_ref, counts_ref = refs
    counts_ref[...] = jnp.zeros_like(counts_ref)

    @pl.loop(0, sizes.blocks)
    def _(block):
        at = pl.ds(block, 1)
        real = _iota((1, BLOCK), 1) + block * BLOCK < real_ref[0]
        key = _groups(sizes, ids_ref[at, :], real, at, *lookup)
        places_ref[at, :] = key  # until the place is known
        ones = _select(_iota((sizes.keys, BLOCK), 0) == key, 1)
        counts_ref[...] += jnp.sum(ones, axis=1, keepdims=True)

    shape = (sizes.keys, sizes_ref.shape[1])
    group, lane = _iota(shape, 0), _iota(shape, 1)
    by_lane = jnp.sum(_select(group == lane, counts_ref[...]), axis=0, keepdims=True)
    sizes_ref[...] = by_lane.astype(jnp.int32)
    # From here on where each group's next row goes.
    counts_ref[...] = jnp.sum(_select(lane < group, by_lane), axis=1, keepdims=True)
    earlier = _select(_iota((BLOCK, BLOCK), 0) < _iota((BLOCK, BLOCK), 1), 1).astype(jnp.bfloat16)

    @pl.loop(0, sizes.blocks)
    def _(block):
        at = pl.ds(block, 1)
        is_key = _iota((sizes.keys, BLOCK), 0) == places_ref[at, :]
        ones = _select(is_key, 1)
        to = _dot(ones, earlier, contract=0) + counts_ref[...]
        place = jnp.sum(_select(is_key, to), axis=0, keepdims=True).astype(jnp.int32)
        counts_ref[...] += jnp.sum(ones, axis=1, keepdims=True)
        places_ref[at, :] = place
        _put(place, block * BLOCK, sizes.order_block, order_ref)


def _groups(sizes: _RerouteSizes, ids, real, at, slots_ref=None, table_ref=None):
    """Return the group of each id [1, BLOCK], or sizes.groups for rows in none."""
    group = ids
    if slots_ref is not None and table_ref is not None:
        slots, shape = slots_ref[at, :], table_ref.shape
        # By slot what each id is turned into, of which the row's own slot is taken.
        wanted = _select(_iota((shape[1], BLOCK), 0) == ids, 1)
        moved = _dot(table_ref[...], wanted, contract=0, exact=True)
        moved = _select(_iota((shape[0], BLOCK), 0) == slots, moved)
        moved = jnp.sum(moved, axis=0, keepdims=True).astype(jnp.int32)
        group = jnp.where((slots >= 0) & (slots < sizes.slots), moved, ids)
    valid = real & (ids >= 0) & (ids < sizes.experts) & (group >= 0) & (group < sizes.groups)
    return jnp.where(valid, group, sizes.groups)


def _put(place, first_row, size: int, order_ref) -> None:
    """Write rows first_row and on to their places [1, BLOCK], of which every one is another."""
    number = (_iota((1, BLOCK), 1) + 1).astype(jnp.float32)
    column = _select(_iota((LANES, BLOCK), 0) == (place & (LANES - 1)), number)
    line = place >> (LANES.bit_length() - 1)

    @pl.loop(0, order_ref.shape[0] // size)
    def _(i):
        at = pl.ds(pl.multiple_of(i * size, size), size)
        lines = _select(_iota((size, BLOCK), 0) + i * size == line, 1)
        numbers = _dot(lines, column, contract=1).astype(jnp.int32)  # 0 where no row goes
        order_ref[at, :] = jnp.where(numbers > 0, numbers + (first_row - 1), order_ref[at, :])


def _dot(x, y, contract: int, *, exact: bool = False):
    """Return x times y over x's columns and y's axis `contract`, of whole numbers up to 256.

    If `exact`, up to 2^24: then it takes six passes of the MXU.
    """
    precision = jax.lax.Precision.HIGHEST if exact else None
    x, y = (x, y) if exact else (x.astype(jnp.bfloat16), y.astype(jnp.bfloat16))
    dims = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(x, y, dims, precision, preferred_element_type=jnp.float32)


def _select(mask, value):
    """Return the value where the mask is, and 0 elsewhere, in float32."""
    return jnp.where(mask, jnp.float32(value) if isinstance(value, int) else value, jnp.float32(0))


def _iota(shape: tuple[int, int], axis: int):
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
