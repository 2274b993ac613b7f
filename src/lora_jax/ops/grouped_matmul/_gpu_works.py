"""Work schedule of the Mosaic GPU kernel: group, rows and columns of each CTA's next unit.

A group's works are its tiles of d_out times its blocks of rows, blocks first, so that the blocks of
one tile of weights come after one another and L2 reads it once. Each tile begins at another block:
where every CTA came to the same block of all tiles, as 132 CTAs do where there are six, 8192 rows
of Mixtral took a tenth longer on an H200. CTA c takes works c, c + ctas, ... of a list that nobody
writes down. Rows in no group are the last group.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from lora_jax.ops.grouped_matmul._gpu_tiles import ALIGN, SKIPS, STRIDE
from lora_jax.typing import Array, Bool, Int

# The first of some groups, the row where it begins, and its first work: all that is kept from one
# work to the next, where sums take nearly every register.
_Cursor = tuple[Array, ...]
# group, first row, end of rows, blocks, first work, end of works
_Place = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Works:
    """The list of one launch: `steps` are the stages that a work of a group takes."""

    groups: int
    rows: int
    tile_rows: int
    tiles: int  # of d_out
    steps: int
    ctas: int

    def for_each(
        self, sizes_ref, num_rows: Int[Array, ""], cta: Int[Array, ""], do: Callable
    ) -> Int[Array, ""]:
        """Call do(group, tile of d_out, first row, low, high, step) for the works of a CTA.

        Rows low to high of the tile are the group's. It is called once more with a group beyond
        all, for nothing. Returns the last step. Each warpgroup walks group_sizes to its next work,
        STRIDE at a time, faster over groups without rows, as most adapters' experts are, and no
        further than to the row `num_rows`, from which on rows are in no group.
        """

        def one(carry):
            index, step, cursor, _ = carry
            place, cursor = self._seek(sizes_ref, num_rows, index, cursor)
            group, start, end, blocks, first, _ = place
            nth, blocks = index - first, lax.max(blocks, jnp.int32(1))
            tile = lax.div(nth, blocks)
            row = start - lax.rem(start, jnp.int32(ALIGN))
            row = row + lax.rem(nth + tile, blocks) * self.tile_rows
            low = lax.max(start - row, jnp.int32(0))
            high = lax.min(end - row, jnp.int32(self.tile_rows))
            do(group, tile, pl.multiple_of(row, ALIGN), low, high, step)
            step = step + jnp.where(group < self.groups, self.steps, 0)
            return index + self.ctas, step, cursor, group <= self.groups

        zero = jnp.int32(0)
        begin = (cta, zero, (zero,) * 3, jnp.bool_(True))
        return lax.while_loop(lambda c: c[3], one, begin)[1]

    def _place(self, sizes_ref, cursor: _Cursor) -> _Place:
        """Return the place of the group at a cursor."""
        group, start, first = cursor
        listed = sizes_ref[lax.min(group, jnp.int32(self.groups - 1))]
        size = jnp.where(group < self.groups, listed, self.rows - start)
        blocks = lax.div((start & (ALIGN - 1)) + size + self.tile_rows - 1, self.tile_rows)
        blocks = jnp.where(size > 0, blocks, 0)
        return group, start, start + size, blocks, first, first + blocks * self.tiles

    def _look(self, sizes_ref, index, cursor: _Cursor) -> tuple[_Place, _Cursor]:
        """Return the place that has this work, of the span at a cursor, and the cursor behind it.

        A span are the groups that are looked at together; the last place is returned if none has.
        """
        place = result = self._place(sizes_ref, cursor)
        for _ in range(min(self.groups, STRIDE) - 1):
            place = self._place(sizes_ref, _behind(place))
            late = index >= result[5]
            result = tuple(jnp.where(late, a, b) for a, b in zip(place, result, strict=True))
        return result, _behind(place)

    def _seek(self, sizes_ref, num_rows, index, cursor: _Cursor) -> tuple[_Place, _Cursor]:
        """Return the place that has this work (group beyond all: none has), its span's cursor."""

        def further(carry):
            cursor, _, behind = carry
            cursor = self._skip(sizes_ref, num_rows, cursor, behind)
            return cursor, *self._look(sizes_ref, index, cursor)

        def is_behind(carry):
            group, row, work = carry[2]
            return (index >= work) & (group <= self.groups) & (row < self.rows)

        first = (cursor, *self._look(sizes_ref, index, cursor))
        cursor, place, behind = lax.while_loop(is_behind, further, first)
        group = jnp.where(index >= behind[2], self.groups + 1, place[0])
        return (group, *place[1:]), cursor

    def _skip(self, sizes_ref, num_rows, cursor: _Cursor, behind: _Cursor) -> _Cursor:
        """Return the cursor behind a span; if that has no rows, behind those after it, too.

        A sum of sizes takes a fraction of what their places do. Behind all rows of groups it is
        that of the rows in none: a step that is not full would walk over all adapters' experts
        otherwise.
        """
        group, row, work = behind
        empty = (cursor[1] == row) & (row < num_rows)
        nonempty = jnp.where(empty, group, jnp.int32(self.groups + 1))
        for length in (n for n in SKIPS if n < self.groups):
            nonempty = lax.while_loop(
                functools.partial(self._is_empty, sizes_ref, length),
                lambda g, length=length: g + length,
                nonempty,
            )
        group = jnp.where(nonempty <= self.groups, nonempty, group)
        return jnp.where(row < num_rows, group, jnp.int32(self.groups)), row, work

    def _is_empty(self, sizes_ref, length: int, group: Int[Array, ""]) -> Bool[Array, ""]:
        """Return whether there are so many groups from this one on, and no row in them."""
        exists = group <= self.groups - length
        begin = jnp.where(exists, group, 0)
        return exists & (sum(sizes_ref[begin + i] for i in range(length)) == 0)


def _behind(place: _Place) -> _Cursor:
    """Return the cursor of the groups behind a place."""
    group, _, end, _, _, last = place
    return group + 1, end, last
