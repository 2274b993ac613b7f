"""Books of the KV pages in host memory: which are there, and which move before the next step.

A page that leaves the device for another's sake comes here under the key that it had
(prefix_cache), and goes back to any device page when a prompt with that key enters. The
page that has been unused longest goes first. No jax: the runner moves the bytes.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

from serving.api.request import PageMove


@dataclasses.dataclass(frozen=True)
class HostPageStats:
    """Pages in host memory; counters count from the start."""

    used: int = 0  # pages
    total: int = 0
    queries: int = 0  # prompt tokens that the device did not have
    hits: int = 0  # of them, those that came from here
    moved_out: int = 0  # pages
    moved_in: int = 0


class HostPages:
    """Keys of `num_slots` places in host memory; 0: nothing is kept."""

    def __init__(self, num_slots: int = 0):
        self._num_slots = num_slots
        self._key_to_slot: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._blank = list(reversed(range(num_slots)))
        self._pinned: frozenset[bytes] = frozenset()
        self._moves: list[PageMove] = []  # in the order in which they must happen
        self._queries = self._hits = self._moved_out = self._moved_in = 0

    @property
    def stats(self) -> HostPageStats:
        counters = self._queries, self._hits, self._moved_out, self._moved_in
        return HostPageStats(len(self._key_to_slot), self._num_slots, *counters)

    def record(self, queries: int, hits: int) -> None:
        """Count a look-up that led to an admission, in tokens."""
        if self._num_slots:
            self._queries += queries
            self._hits += hits

    def pin(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the longest beginning of `keys` that is here; it stays until `unpin`."""
        pinned: list[bytes] = []
        for key in keys:
            if key not in self._key_to_slot:
                break
            pinned.append(key)
        self._pinned = frozenset(pinned)
        return pinned

    def unpin(self) -> None:
        """Let go of what `pin` found."""
        self._pinned = frozenset()

    def take_out(self, page: int, key: bytes) -> None:
        """Keep what a page of the device holds, which is about to be another's."""
        if not self._num_slots:
            return
        if key in self._key_to_slot:
            self._key_to_slot.move_to_end(key)
            return
        slot = self._blank_slot()
        if slot is None:
            return
        self._key_to_slot[key] = slot
        self._moved_out += 1
        self._moves.append(PageMove(page, slot, out=True))

    def bring_in(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Have pages of the device filled with what is here under pinned keys; it stays here."""
        for key, page in zip(keys, pages, strict=True):
            self._key_to_slot.move_to_end(key)
            self._moves.append(PageMove(page, self._key_to_slot[key], out=False))
        self._moved_in += len(keys)

    def take_moves(self) -> tuple[PageMove, ...]:
        """Return what moves before the step that is planned, once."""
        moves, self._moves = tuple(self._moves), []
        return moves

    def check_integrity(self) -> None:
        """Raise AssertionError when keys and slots disagree."""
        slots = [*self._blank, *self._key_to_slot.values()]
        assert sorted(slots) == list(range(self._num_slots)), "a slot is lost or used twice"
        assert not self._pinned, "keys are pinned between two plans"

    def _blank_slot(self) -> int | None:
        if self._blank:
            return self._blank.pop()
        oldest = next((key for key in self._key_to_slot if key not in self._pinned), None)
        return None if oldest is None else self._key_to_slot.pop(oldest)
