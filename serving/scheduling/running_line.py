"""The sequences that run, in order of their deadlines, each with a row of the batch. No jax."""

import bisect
import heapq
from collections.abc import Iterator

from serving.api.request import Sequence
from serving.scheduling.waiting_line import order_of, take_out


class RunningLine:
    """A sorted list of the running sequences, and the rows that none of them has."""

    def __init__(self, num_rows: int):
        self._num_rows = num_rows
        self._line: list[Sequence] = []
        self._free_rows = list(range(num_rows))

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._line)

    @property
    def num_free_rows(self) -> int:
        """Number of further sequences that may run."""
        return len(self._free_rows)

    def add(self, sequence: Sequence) -> None:
        """Put a sequence where its deadline says and give it the lowest free row."""
        bisect.insort(self._line, sequence, key=order_of)
        sequence.row = heapq.heappop(self._free_rows)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, which must be there, and its row back."""
        take_out(self._line, sequence)
        heapq.heappush(self._free_rows, sequence.row)
        sequence.row = -1

    def check_integrity(self) -> None:
        """Raise AssertionError unless it is in order and each row is free or one sequence's."""
        assert self._line == sorted(self._line, key=order_of), "running out of order"
        rows = [sequence.row for sequence in self._line] + self._free_rows
        assert sorted(rows) == list(range(self._num_rows)), f"rows {rows}"
