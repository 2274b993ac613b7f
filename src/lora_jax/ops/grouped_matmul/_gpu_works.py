"""Which group, rows and columns the CTAs of the Mosaic GPU kernel take next: counted as they go.

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

    def for_each(self, sizes_ref, cta: Int[Array, ""], do: Callable) -> Int[Array, ""]:
        """Call do(group, tile of d_out, first row, low, high, step) for the works of a CTA.

        Rows low to high of the tile are the group's. It is called once more with a group beyond
        all, for nothing. Returns the last step. Each warpgroup walks group_sizes to its next work,
        STRIDE at a time, faster over groups without rows, as most adapters' experts are, and no
        further than to the last row.
        """

        def one(carry):
            index, step, span, _ = carry
            place, span = self._seek(sizes_ref, index, span)
            group, start, end, blocks, first, _ = place
            nth, blocks = index - first, lax.max(blocks, jnp.int32(1))
            tile = lax.div(nth, blocks)
            row = start - lax.rem(start, jnp.int32(ALIGN))
            row = row + lax.rem(nth + tile, blocks) * self.tile_rows
            low = lax.max(start - row, jnp.int32(0))
            high = lax.min(end - row, jnp.int32(self.tile_rows))
            do(group, tile, pl.multiple_of(row, ALIGN), low, high, step)
            step = step + jnp.where(group < self.groups, self.steps, 0)
            return index + self.ctas, step, span, group <= self.groups

        zero = jnp.int32(0)
        before = (jnp.int32(-1), *(zero,) * 5)
        begin = (cta, zero, (before, before), jnp.bool_(True))
        return lax.while_loop(lambda c: c[3], one, begin)[1]

    def _behind(self, sizes_ref, place: _Place) -> _Place:
        """Return the place of the next group."""
        group, start, first = place[0] + 1, place[2], place[5]
        listed = sizes_ref[lax.min(group, jnp.int32(self.groups - 1))]
        size = jnp.where(group < self.groups, listed, self.rows - start)
        blocks = lax.div((start & (ALIGN - 1)) + size + self.tile_rows - 1, self.tile_rows)
        blocks = jnp.where(size > 0, blocks, 0)
        return group, start, start + size, blocks, first, first + blocks * self.tiles

    def _seek(self, sizes_ref, index, span: tuple[_Place, _Place]):
        """Return the place that has this work (group beyond all: none has) and its span.

        A span is the first and the last place of the groups that are looked at together.
        """
        stride = min(self.groups, STRIDE)

        def next_span(span):
            first = last = self._behind(sizes_ref, self._skip(sizes_ref, span))
            for _ in range(stride - 1):
                last = self._behind(sizes_ref, last)
            return first, last

        span = lax.while_loop(
            lambda s: (index >= s[1][5]) & (s[1][0] < self.groups) & (s[1][2] < self.rows),
            next_span,
            span,
        )
        place = found = span[0]
        for _ in range(stride - 1):
            place = self._behind(sizes_ref, place)
            late = index >= found[5]
            found = tuple(jnp.where(late, a, b) for a, b in zip(place, found, strict=True))
        group = jnp.where(index >= found[5], self.groups + 1, found[0])
        return (group, *found[1:]), span

    def _skip(self, sizes_ref, span: tuple[_Place, _Place]) -> _Place:
        """Return the last place of a span; if it has no rows, the last of those behind it, too.

        A sum of sizes takes a fraction of what their places do.
        """
        group, start, end, blocks, first, last = span[1]
        found = jnp.where((span[0][1] == end) & (span[0][0] >= 0), group, jnp.int32(self.groups))
        for length in (n for n in SKIPS if n < self.groups):
            found = lax.while_loop(
                functools.partial(self._is_empty, sizes_ref, length),
                lambda g, length=length: g + length,
                found,
            )
        group = jnp.where(found < self.groups, found, group)
        return group, start, end, blocks, first, last

    def _is_empty(self, sizes_ref, length: int, group: Int[Array, ""]) -> Bool[Array, ""]:
        """Return whether there are so many groups behind this one, and no row in them."""
        there = group < self.groups - length
        begin = jnp.where(there, group + 1, 0)
        return there & (sum(sizes_ref[begin + i] for i in range(length)) == 0)
