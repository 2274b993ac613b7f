"""First-fit allocation of contiguous rows of one pool, and of one pool for each width. No jax."""

from collections.abc import Iterable, Mapping, Sequence

Rows = tuple[int, int, int]  # width, first row, number of rows


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
    def longest(self) -> int:
        """Rows of the longest free run."""
        return max((length for _, length in self._free), default=0)

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


def take_all(
    pools: Mapping[int, RowRanges],
    demand: Sequence[tuple[int, int]],
    need: Mapping[int, int] | None = None,
) -> list[int] | None:
    """Take rows for matrices of (width, rows); return where each begins, or None and take nothing.

    Those of a width follow each other where a free run is long enough. `need` is what `need_of`
    returns, for a caller that knows it.
    """
    need = need_of(demand) if need is None else need
    whole = _take_each(pools, need.items())
    if whole is None:
        return _take_each(pools, demand)
    next_row, starts = dict(zip(need, whole, strict=True)), []
    for width, count in demand:
        starts.append(next_row[width])
        next_row[width] += count
    return starts


def fits(
    pools: Mapping[int, RowRanges],
    demand: Sequence[tuple[int, int]],
    need: Mapping[int, int] | None = None,
) -> bool:
    """Return whether `take_all` would take rows now; it takes none."""
    need = need_of(demand) if need is None else need
    if all(pools[width].longest >= count for width, count in need.items()):
        return True
    if any(pools[width].num_free < count for width, count in need.items()):
        return False
    return take_all({width: pools[width].copy() for width in need}, demand, need) is not None


def need_of(demand: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the rows of each width that matrices of (width, rows) take."""
    need: dict[int, int] = {}
    for width, count in demand:
        need[width] = need.get(width, 0) + count
    return need


def runs_of(demand: Iterable[tuple[int, int]], starts: Iterable[int]) -> tuple[Rows, ...]:
    """Return the rows of matrices of (width, rows) that begin at `starts`, as runs.

    Matrices of a width that follow each other, as those of `take_all` mostly do, are one run.
    """
    runs: list[Rows] = []
    open_runs: dict[int, tuple[int, int]] = {}  # by width: first row, and the one behind the last
    for (width, count), start in zip(demand, starts, strict=True):
        first, end = open_runs.get(width, (start, start))
        if end != start:
            runs.append((width, first, end - first))
            first = start
        open_runs[width] = first, start + count
    runs += [(width, first, end - first) for width, (first, end) in open_runs.items()]
    return tuple(runs)


def _take_each(
    pools: Mapping[int, RowRanges], demand: Iterable[tuple[int, int]]
) -> list[int] | None:
    """Take a run for each of (width, rows); return their starts, or None and take nothing."""
    taken: list[Rows] = []
    for width, count in demand:
        start = pools[width].take(count)
        if start is None:
            for rows in taken:
                pools[rows[0]].give(*rows[1:])
            return None
        taken.append((width, start, count))
    return [start for _, start, _ in taken]
