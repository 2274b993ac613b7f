"""Inputs of a step from the host: the step table, block tables of KV pages, token masks.

In place, every array stays at its address on the device, and new values are written over the old
ones. A step's table and the pages that are new since the step before go out as one small array: on
a GPU a copy and the call that takes it cost the engine's thread 0.4 ms, whatever their size.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.typing import Array, Int
from serving.api.sampling import MAX_LOGPROBS
from serving.steps.device_state import numbers_of_row
from serving.steps.sampling.token_masks import num_words
from serving.steps.step import StepSizes

_HOLE_BYTES = (1 << 9, 1 << 12, 1 << 15, 1 << 18)  # each 8 times the one before
_HOLES = 32  # of each size
_SMALL_TABLES = 1 << 15  # bytes of block tables that every step on a CPU takes from the host
_FEW_PAGES = 64  # new ones that every table has room for; twice its sequences if they are more


class HostInputs:
    """Arrays of one engine's steps that the host writes; the runner's thread uses it."""

    def __init__(self, sizes: StepSizes, place: Callable[[Any], jax.Array], *, in_place: bool):
        """`place` brings an array to the step's devices."""
        self._place, self._in_place = place, in_place
        self._tables = np.zeros((sizes.max_seqs, sizes.max_pages), np.int32)
        self._new: list[np.ndarray] = []  # int32 [3, pages]: row, place in it, page
        self._room = _page_room(sizes)
        self.table: Int[Array, "table_rows seqs"] = place(
            np.zeros((sizes.table_rows, sizes.max_seqs), np.int32)
        )
        self.pages: Any = place(self._tables.copy())  # int32 [seqs, max_pages]
        # Small ones come to a CPU with a call's other arguments: that takes no time to speak of, a
        # program's copy 13 to 40 us, jax.device_put 90.
        self._copied: Callable[[np.ndarray], Any] = place
        if not in_place and self._tables.nbytes <= _SMALL_TABLES:
            self._copied = np.asarray
            self.pages = self._tables.copy()
        elif self.pages.is_fully_addressable:
            self._copied = jax.jit(jnp.copy, out_shardings=self.pages.sharding)
        self.number: np.ndarray | jax.Array = place(
            np.zeros(1, np.int32)
        )  # of the masks it waits for
        self.masks: jax.Array | None = None  # HostMasks.packed

    def set_pages(self, tables: np.ndarray) -> None:
        """Use these block tables, int32 [seqs, max_pages], from now on."""
        self._tables[...] = tables
        self._new = []
        self._send_pages()

    def add_pages(self, row: int, first: int, pages: np.ndarray) -> None:
        """Put pages into a row of the block tables, from place `first` on, before the next step."""
        self._tables[row, first : first + len(pages)] = pages
        if not self._in_place:  # the tables go out whole
            self._new = [self._tables]
            return
        places = np.arange(first, first + len(pages), dtype=np.int32)
        self._new.append(np.stack([np.full_like(places, row), places, pages]))

    def set_table(
        self, table: np.ndarray, number: int = 0
    ) -> np.ndarray | Int[Array, "table_rows seqs"]:
        """Return the step's table as its program takes it; new pages are in their place then.

        `number` is that of the masks which the host will post for the step; 0: none.
        """
        new, self._new = self._new, []
        if new and (not self._in_place or sum(one.shape[1] for one in new) > self._room):
            self._send_pages()
            new = []
        if not self._in_place:
            self.number = np.array([number], np.int32)
            return table
        parts = table.reshape(-1), self._packed(new).reshape(-1), np.array([number], np.int32)
        written = _write(self.table, self.pages, self.number, np.concatenate(parts))
        self.table, self.pages, self.number = written
        return self.table

    def set_masks(self, packed: np.ndarray) -> jax.Array:
        """Return HostMasks.packed on the device."""
        masks = self.masks = self.replace(self.masks, packed)
        return masks

    def replace(self, old: Any, new: Any) -> Any:
        """Return a tree of arrays with the host's values of `new`, where those of `old` lie.

        The old ones are donated; None: there are none yet.
        """
        if old is None or not self._in_place:
            return jax.tree.map(self._place, new)
        return jax.tree.map(_overwrite, old, new)

    def _send_pages(self) -> None:
        new = self._tables.copy()
        self.pages = _overwrite(self.pages, new) if self._in_place else self._copied(new)

    def _packed(self, new: list[np.ndarray]) -> np.ndarray:
        """Return new pages in an array of one shape; the others' rows do not exist."""
        packed = np.zeros((3, self._room), np.int32)
        packed[0] = len(self._tables) + np.arange(self._room)
        given = np.concatenate(new, axis=1) if new else packed[:, :0]
        packed[:, : given.shape[1]] = given
        return packed


@functools.partial(jax.jit, donate_argnums=0)
def _overwrite(old: Int[Array, "*shape"], new: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Return `new` in the memory of `old`."""
    return old.at[...].set(new)


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def _write(
    table: Int[Array, "table_rows seqs"],
    pages: Int[Array, "seqs max_pages"],
    number: Int[Array, "1"],
    packed: Int[Array, "numbers"],
) -> tuple[Int[Array, "table_rows seqs"], Int[Array, "seqs max_pages"], Int[Array, "1"]]:
    """Return the new table, block tables with the new pages, and number, in their own memory."""
    row, place, page = packed[table.size : -1].reshape(3, -1)
    new = packed[: table.size].reshape(table.shape)
    written = pages.at[row, place].set(page, mode="drop", unique_indices=True)
    return table.at[...].set(jnp.asarray(new)), written, number.at[...].set(packed[-1:])


def largest_bytes(sizes: StepSizes, vocab_size: int) -> int:
    """Return the bytes of the largest array that comes with a step or a new row, or goes with them.

    `vocab_size` is 0 where no step has masks. Images and a LoRA Server's tables are not counted.
    """
    masks = sizes.num_masks * num_words(vocab_size) + sizes.max_logit_rows if vocab_size else 0
    numbers = (
        sizes.table_rows * sizes.max_seqs + 3 * _page_room(sizes) + 1,
        sizes.max_seqs * sizes.max_pages,
        1 + numbers_of_row(sizes.max_len),
        sizes.max_logit_rows * MAX_LOGPROBS,
        masks,
    )
    return 4 * max(numbers)


def _page_room(sizes: StepSizes) -> int:
    return max(_FEW_PAGES, 2 * sizes.max_seqs)


def make_holes(put: Callable[[Any], jax.Array], largest: int | None = None) -> list[jax.Array]:
    """Leave free places for small arrays, kept apart by the arrays returned.

    Otherwise the allocator cuts them from the front of the memory that programs take for their
    temporaries, which then lie elsewhere in every step. `largest` are the bytes of the largest such
    array, and larger places than it needs are left out; None: there are places of all sizes.
    All of them take 18.3 MiB, half of it free, those up to 32 KiB 2.3 MiB.
    """
    kinds = [size for size in _HOLE_BYTES if largest is None or size // 8 < largest]
    arrays = [put(np.zeros(size, np.uint8)) for _ in range(_HOLES) for size in kinds * 2]
    jax.block_until_ready(arrays)
    step = len(kinds)
    return [array for i, array in enumerate(arrays) if i // step % 2]
