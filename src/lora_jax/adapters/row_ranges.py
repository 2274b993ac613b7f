"""First-fit allocation of contiguous rows of one pool. No jax."""


class RowRanges:
    """The free rows of a pool of `total` rows, as sorted, disjoint, non-touching ranges."""

    def __init__(self, total: int):
        if total < 0:
            raise ValueError(f"A pool cannot have {total} rows.")
        self.total = total
        self._free: list[tuple[int, int]] = [(0, total)] if total else []  # (start, length)

    @property
    def num_free(self) -> int:
        return sum(length for _, length in self._free)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The free ranges as (start, length), in order."""
        return tuple(self._free)

    def copy(self) -> "RowRanges":
        """Return an independent copy, to try allocations on."""
        other = RowRanges(0)
        other.total, other._free = self.total, list(self._free)
        return other

    def take(self, length: int) -> int | None:
        """Take the first free run of `length` > 0 rows and return its start; None if none fits."""
        if length <= 0:
            raise ValueError(f"Cannot take {length} rows.")
        for i, (start, free) in enumerate(self._free):
            if free >= length:
                self._free[i : i + 1] = [(start + length, free - length)] if free > length else []
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Return rows [start, start + length); ValueError when any of them is free already."""
        if start < 0 or length <= 0 or start + length > self.total:
            raise ValueError(f"Rows {start}..{start + length} are not in a pool of {self.total}.")
        at = next((i for i, (s, _) in enumerate(self._free) if s > start), len(self._free))
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        if (before and sum(before) > start) or (after and start + length > after[0]):
            raise ValueError(f"Rows {start}..{start + length} are free already.")
        first, end = at, at
        if before and sum(before) == start:
            first, start, length = at - 1, before[0], before[1] + length
        if after and start + length == after[0]:
            end, length = at + 1, length + after[1]
        self._free[first:end] = [(start, length)]
