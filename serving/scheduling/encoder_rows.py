"""Rows of the encoder cache: their images and use counts. No jax.

An image's rows may lie anywhere, so that nothing fragments. Images nobody needs stay findable
until their rows are taken, the least recently used one first.
"""

import collections
from collections.abc import Sequence


class EncoderRows:
    """Reference-counted rows of images by key."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._rows: dict[bytes, tuple[int, ...]] = {}
        self._users: collections.Counter[bytes] = collections.Counter()
        self._idle: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self.queries = self.hits = 0

    @property
    def num_used(self) -> int:
        """Rows that hold an image."""
        return self.num_rows - len(self._free)

    def rows_of(self, key: bytes) -> tuple[int, ...]:
        """Return the rows of an image that is held."""
        return self._rows[key]

    def hold(self, images: Sequence[tuple[bytes, int]]) -> list[bool] | None:
        """Hold all images, given as key and size; None, and no change, when rows are short.

        Returns for each whether its rows are new, that is, empty.
        """
        wanted: dict[bytes, int] = {}
        for key, size in images:
            if key not in self._rows:
                wanted[key] = size
        keys = {key for key, _ in images}
        spare = sum(len(self._rows[key]) for key in self._idle if key not in keys)
        if sum(wanted.values()) > len(self._free) + spare:
            return None
        for key, _ in images:
            self._users[key] += 1
            self._idle.pop(key, None)
        are_new = []
        for key, size in images:
            are_new.append(key not in self._rows)
            if key not in self._rows:
                self._rows[key] = self._take(size)
        self.queries += len(images)
        self.hits += are_new.count(False)
        return are_new

    def release(self, key: bytes) -> None:
        """Need an image once less."""
        if not self._users[key]:
            raise ValueError("An image is released that nobody holds.")
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._idle[key] = None

    def forget(self, key: bytes) -> None:
        """Never find an image again that nobody holds."""
        if key in self._idle:
            del self._idle[key]
            self._free.extend(self._rows.pop(key))

    def check_integrity(self, held: Sequence[bytes]) -> None:
        """Raise AssertionError when the books disagree, or disagree with what is held."""
        owned = [row for rows in self._rows.values() for row in rows]
        assert sorted([*owned, *self._free]) == list(range(self.num_rows)), "rows are lost"
        assert +self._users == collections.Counter(held), "users and holders disagree"
        assert set(self._idle) == set(self._rows) - set(self._users), "idle images disagree"

    def _take(self, size: int) -> tuple[int, ...]:
        while len(self._free) < size:
            key, _ = self._idle.popitem(last=False)
            self._free.extend(self._rows.pop(key))
        return tuple(self._free.pop() for _ in range(size))
