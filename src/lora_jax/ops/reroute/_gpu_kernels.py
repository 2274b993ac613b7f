"""The two launches of the Mosaic row map: rows counted by group, and rows put in their places.

A CTA's warpgroups work through pieces of 64 rows: what is of rows lies along wgmma's M, and so does
what is of groups, 64 at a time.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops import hopper
from lora_jax.ops.reroute._gpu_addresses import DOWN, gather, scatter
from lora_jax.typing import Array, Int

PIECE = 64  # rows, or groups
TILE = (PIECE, PIECE)
ACROSS = plgpu.Layout.WGMMA.reduce(0)  # of a vector along N


@dataclasses.dataclass(frozen=True)
class RerouteConfig:
    """Division of the rows, chosen while tracing."""

    warpgroups: int
    pieces: int  # of each warpgroup

    @property
    def own_rows(self) -> int:
        """Rows of a warpgroup."""
        return self.pieces * PIECE

    @property
    def rows(self) -> int:
        """Rows of a CTA."""
        return self.warpgroups * self.own_rows


@dataclasses.dataclass(frozen=True)
class RerouteSizes:
    """Static sizes of one call."""

    rows: int
    k: int
    groups: int
    ctas: int
    table: tuple[int, int] | None  # slots and experts, where rows are rerouted

    @property
    def tiles(self) -> int:
        """Tiles of groups; the rows that are in none count as one more."""
        return self.groups // PIECE + 1

    @property
    def kinds(self) -> int:
        """Groups of all tiles."""
        return self.tiles * PIECE

    @property
    def column_tiles(self) -> int:
        """Tiles of CTAs."""
        return pl.cdiv(self.ctas, PIECE)


def _iota(axis: int):
    return plgpu.broadcasted_iota(jnp.int32, TILE, axis, layout=plgpu.Layout.WGMMA)


def _spread(vector, axis: int):
    """Return a tile of a vector that lies along an axis."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, TILE, (axis,)), plgpu.Layout.WGMMA)


def _sum_where(condition, values):
    some = jnp.where(condition, values, jnp.zeros_like(values))
    return plgpu.layout_cast(jnp.sum(some, axis=1), DOWN)


def _count(condition):
    """Return how many of each row are true."""
    return plgpu.layout_cast(jnp.sum(condition.astype(jnp.int32), axis=1), DOWN)


def _load(ref, first, layout=DOWN, size: int = PIECE):
    return plgpu.load(ref.at[pl.ds(first, size)], layout=layout, optimized=False)


def _none():
    return plgpu.layout_cast(jnp.zeros((PIECE,), jnp.int32), DOWN)


def _places(first, size: int = PIECE):
    """Return so many numbers from `first` on."""
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=DOWN) + first


def _sum_loads(ref, rows: int, step: int, first):
    """Return the sum of 64 numbers of each row from `first` on; rows are `step` numbers apart."""
    more = lambda row, total: total + _load(ref, row * step + first)  # noqa: E731
    return lax.fori_loop(0, rows, more, _none())


def _counts(keys_across, tile):
    """Return how many keys are of each group of a tile."""
    return _count(_iota(0) + tile * PIECE == _spread(keys_across, 1))


def _find_keys(sizes: RerouteSizes, first, num_rows: int, refs, interpreted: bool):
    """Return (groups, chosen experts) of the rows from `first` on; group `sizes.groups` is none."""
    ids_ref, num_ref, *owners = refs
    ids = _load(ids_ref, first, size=num_rows)
    row = _places(first, num_rows)
    experts = sizes.table[1] if sizes.table else sizes.groups
    valid = (row < num_ref[0] * sizes.k) & (ids >= 0) & (ids < experts)
    ids = jnp.where(valid, ids, jnp.zeros_like(ids))
    keys = ids
    if sizes.table:
        owner_ref, table_ref = owners
        token = lax.div(jnp.minimum(row, sizes.rows - 1), jnp.full_like(row, sizes.k))
        slot = gather(owner_ref, token, interpreted)
        has = (slot >= 0) & (slot < sizes.table[0])
        slot = jnp.where(has, slot, jnp.zeros_like(slot))
        moved = gather(table_ref, slot * experts + ids, interpreted)
        keys = jnp.where(has, moved, ids)
        valid = valid & (keys >= 0) & (keys < sizes.groups)
    return jnp.where(valid, keys, jnp.full_like(keys, sizes.groups)), ids


def _meet(barrier) -> None:
    """Wait for all warpgroups of the CTA."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def _share_tiles(do: Callable, sizes: RerouteSizes, config: RerouteConfig) -> None:
    """Call do(tile) for every tile of groups, by the warpgroups in turn."""
    warpgroup, step = lax.axis_index("warpgroup"), config.warpgroups

    def one(j, _):
        tile = j * step + warpgroup
        pl.when(tile < sizes.tiles)(lambda: do(tile))

    lax.fori_loop(0, pl.cdiv(sizes.tiles, step), one, None)


def _launch(
    body: Callable, config: RerouteConfig, sizes: RerouteSizes, outs: list, scratch: list, interpret
):
    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in outs],
        grid=(sizes.ctas,),
        grid_names=("cta",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            *(plgpu.SMEM(shape, jnp.int32) for shape in scratch),
            plgpu.Barrier(num_arrivals=config.warpgroups),
        ],
        interpret=interpret or False,
    )


# Equal launches of a program's layers are traced, lowered and compiled once.
@functools.partial(jax.jit, static_argnames=("sizes", "config", "interpret"))
def count_rows(
    ids: Int[Array, "padded"],
    num_tokens: Int[Array, "1"],
    owners: tuple[Array, ...],
    sizes: RerouteSizes,
    config: RerouteConfig,
    interpret: hopper.Interpret,
) -> Int[Array, "kinds columns"]:
    """Return how many rows of each CTA, a column, are of each group."""
    pieces, warpgroups = config.pieces, config.warpgroups

    def _count_kernel(*refs):
        *refs, counts_ref, key_smem, count_smem, barrier = refs
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")

        offset = warpgroup * config.own_rows
        first = cta * config.rows + offset
        keys, _ = _find_keys(sizes, first, config.own_rows, refs, bool(interpret))
        key_smem[pl.ds(offset, config.own_rows)] = keys

        def count(tile, _):
            def more(p, total):
                return total + _counts(_load(key_smem, offset + p * PIECE, ACROSS), tile)

            first = warpgroup * sizes.kinds + tile * PIECE
            count_smem[pl.ds(first, PIECE)] = lax.fori_loop(0, pieces, more, _none())

        lax.fori_loop(0, sizes.tiles, count, None)
        _meet(barrier)

        def add(tile):
            total = _sum_loads(count_smem, warpgroups, sizes.kinds, tile * PIECE)
            counts_ref[pl.ds(tile * PIECE, PIECE), cta] = total

        _share_tiles(add, sizes, config)

    scratch = [(config.rows,), (warpgroups * sizes.kinds,)]
    outs = [(sizes.kinds, sizes.column_tiles * PIECE)]
    launch = _launch(_count_kernel, config, sizes, outs, scratch, interpret)
    return launch(ids, num_tokens, *owners)[0]


@functools.partial(jax.jit, static_argnames=("sizes", "config", "interpret"))
def place_rows(
    ids: Int[Array, "padded"],
    num_tokens: Int[Array, "1"],
    owners: tuple[Array, ...],
    counts: tuple[Int[Array, "kinds columns"], ...],
    sizes: RerouteSizes,
    config: RerouteConfig,
    interpret: hopper.Interpret,
) -> list[Array]:
    """Return order, inverse, sizes, tokens and experts; counts are there if CTAs are many."""
    pieces, interpreted = config.pieces, bool(interpret)
    all_pieces = config.warpgroups * pieces

    def _place_kernel(*refs):
        *refs, key_smem, same_smem, rank_smem, count_smem, total_smem, before_smem, barrier = refs
        *refs, order_ref, inverse_ref, sizes_ref, token_ref, expert_ref = refs
        inputs, counts_refs = refs[: 2 + len(owners)], refs[2 + len(owners) :]
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        offset, num_own = warpgroup * config.own_rows, config.own_rows
        first_row = cta * config.rows + offset
        keys, ids = _find_keys(sizes, first_row, num_own, inputs, interpreted)
        # Twice, since equal loads become one, which then has one layout.
        key_smem[pl.ds(offset, num_own)] = keys
        same_smem[pl.ds(offset, num_own)] = keys

        def rank_piece(p, _):
            """Find the ranks of a piece's rows among its equals, and its counts."""
            at = offset + p * PIECE
            across = functools.partial(_load, same_smem, at, ACROSS)
            equal = _spread(_load(key_smem, at), 0) == _spread(across(), 1)
            rank_smem[pl.ds(at, PIECE)] = _count(equal & (_iota(1) < _iota(0)))

            def count(tile, _):
                first = (warpgroup * pieces + p) * sizes.kinds + tile * PIECE
                count_smem[pl.ds(first, PIECE)] = _counts(across(), tile)

            lax.fori_loop(0, sizes.tiles, count, None)

        lax.fori_loop(0, pieces, rank_piece, None)
        _meet(barrier)

        def add(tile):
            """Sum a tile of groups over all CTAs, and over those before this one."""
            groups = pl.ds(tile * PIECE, PIECE)
            if not counts_refs:
                total_smem[groups] = _sum_loads(count_smem, all_pieces, sizes.kinds, groups.start)
                before_smem[groups] = _none()
                return

            def more(column, sums):
                source = counts_refs[0].at[groups, pl.ds(column * PIECE, PIECE)]
                counts = plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
                cta_index = _iota(1) + column * PIECE
                ends = sizes.ctas, cta
                return tuple(
                    total + _sum_where(cta_index < end, counts)
                    for total, end in zip(sums, ends, strict=True)
                )

            sums = lax.fori_loop(0, sizes.column_tiles, more, (_none(), _none()))
            total_smem[groups], before_smem[groups] = sums

        _share_tiles(add, sizes, config)
        _meet(barrier)

        def begin_groups(tile):
            """Turn the counts of a tile of groups into the places where their rows begin."""
            groups = pl.ds(tile * PIECE, PIECE)

            def lower(other, start):
                total = _spread(_load(total_smem, other * PIECE, ACROSS), 1)
                smaller = _iota(1) + other * PIECE < _iota(0) + tile * PIECE
                return start + _sum_where(smaller, total)

            def move(p, start):
                at = p * sizes.kinds + groups.start
                count = _load(count_smem, at)
                count_smem[pl.ds(at, PIECE)] = start
                return start + count

            start = lax.fori_loop(0, tile + 1, lower, _load(before_smem, groups.start))
            lax.fori_loop(0, all_pieces, move, start)

            @pl.when(cta == 0)
            def _():
                group = _places(groups.start)
                group = jnp.where(group < sizes.groups, group, jnp.full_like(group, -1))
                scatter(sizes_ref, group, _load(total_smem, groups.start), interpreted)

        _share_tiles(begin_groups, sizes, config)
        _meet(barrier)

        # Each row's place: where its group begins in its piece, and its rank there.
        row, within = _places(first_row, num_own), _places(offset, num_own)
        piece = lax.div(within, jnp.full_like(within, PIECE))
        starts = gather(count_smem, piece * sizes.kinds + keys, interpreted)
        place = starts + _load(rank_smem, offset, size=num_own)
        there, nowhere = row < sizes.rows, jnp.full_like(row, -1)
        token = lax.div(row, jnp.full_like(row, sizes.k))
        expert = jnp.where(keys < sizes.groups, ids, jnp.zeros_like(ids))
        to = jnp.where(there, place, nowhere)
        for ref, value in ((order_ref, row), (token_ref, token), (expert_ref, expert)):
            scatter(ref, to, value, interpreted)
        scatter(inverse_ref, jnp.where(there, row, nowhere), place, interpreted)

    scratch = [(config.rows,), (config.rows,), (config.rows,), (all_pieces * sizes.kinds,)]
    scratch += [(sizes.kinds,), (sizes.kinds,)]
    rows = (sizes.rows,)
    outs = [rows, rows, (sizes.groups,), rows, rows]
    launch = _launch(_place_kernel, config, sizes, outs, scratch, interpret)
    return launch(ids, num_tokens, *owners, *counts)
