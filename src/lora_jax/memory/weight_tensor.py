"""Expert weights as one array whose shape never changes, with pages only where experts are.

ExpertWeave, section 4.2: a contiguous address range for all experts that may ever be there, and
"Expert-Page Alignment": a page that holds bytes of several experts stays until none is left. Pages
that hold only experts that are mapped in one call are one block; those at the ends, where
neighbours may lie, are blocks of their own.
"""

import dataclasses
import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from lora_jax.memory.pool import Block, PagePool
from lora_jax.memory.virtual import MappingError
from lora_jax.typing import Array


@dataclasses.dataclass(eq=False)
class _Placed:
    """A block, its first page within the range, and how many mapped or kept experts need it."""

    start: int
    block: Block
    users: int = 0

    @property
    def numbers(self) -> range:
        return range(self.start, self.start + self.block.num_pages)


class WeightTensor:
    """[experts_total, d_out, d_in] weights of one layer and projection; safe for threads.

    Experts are mapped, written and unmapped by index; a program may read the mapped ones. The
    caller unmaps and closes only what no step in flight can read (see Retirement).
    """

    def __init__(
        self,
        pool: PagePool,
        shape: tuple[int, int, int],
        dtype: np.dtype,
        *,
        overrun: int = 0,
        cleared: bool = False,
    ):
        """Reserve the addresses; no page is taken.

        Programs may read up to `overrun` experts behind a mapped one: the pages of those are there
        as long as the mapped one is. With `cleared` pages that come are zeros when the memory's
        `finish_clears` returns; call it before the next program is sent to the device.

        Raises:
            ValueError: a shape that is not three positive numbers, or a negative overrun.
            OutOfPages: there is no address space for it.
        """
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"shape {shape} must be (experts_total, d_out, d_in), all positive")
        if overrun < 0:
            raise ValueError(f"overrun {overrun} must be at least 0")
        self.pool, self.shape, self.dtype = pool, shape, np.dtype(dtype)
        self._overrun, self._cleared, self._kept = overrun, cleared, range(0)
        self.expert_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        self._reserved = -(-shape[0] * self.expert_bytes // pool.page_bytes) * pool.page_bytes
        self._lock = threading.Lock()
        self._mapped: set[int] = set()
        self._placed: dict[int, _Placed] = {}  # by the number of each of its pages
        self._stuck: set[_Placed] = set()  # without users, but the system would not unmap them
        self._open = True
        self._array: Array | None = None
        self.address = pool.memory.reserve(self._reserved)

    @property
    def array(self) -> Array:
        """Return the whole tensor as one jax.Array, always the same; mapped experts may be read.

        Raises:
            MappingError: the tensor is closed.
            NotImplementedError: jax has no such device; then there is only `address`.
        """
        if (
            array := self._array
        ) is not None:  # without the lock, so that no step waits for a load's writes
            return array
        with self._lock:
            self._check_open()
            if (array := self._array) is None:
                array = self.pool.memory.array(self.address, self.shape, self.dtype)
                self._array = array
            return array

    @property
    def mapped(self) -> tuple[int, ...]:
        """Return the indices of the experts that have memory, sorted."""
        with self._lock:
            return tuple(sorted(self._mapped))

    @property
    def bytes_mapped(self) -> int:
        """Return the bytes of the pages behind this tensor."""
        with self._lock:
            return len(self._placed) * self.pool.page_bytes

    def keep(self, indices: range) -> None:
        """Have pages below some experts for good, mapped or not; once, before any is mapped.

        Raises what `map` raises.
        """
        with self._lock:
            self._check(indices)
            assert not self._placed, "something is mapped already"
            self._fill(indices)
            self._kept = indices
            for placed, count in self._users_among(indices).items():
                placed.users += count

    def num_missing(self, indices: range) -> int:
        """Return how many pages `map` of consecutive experts would take."""
        with self._lock:
            self._check(indices)
            return sum(len(run) for run in self._missing(indices))

    def map(self, indices: range) -> None:
        """Give consecutive experts memory; without `cleared`, of undefined contents until written.

        Pages that hold nobody else's bytes are taken as one block, and leave together, when the
        last of these experts does.

        Raises:
            MappingError: an index outside the tensor, or mapped already.
            OutOfPages: the pool has no room. Either way nothing has changed.
        """
        with self._lock:
            self._check(indices)
            if taken := self._mapped.intersection(indices):
                raise MappingError(f"experts {sorted(taken)} are mapped already")
            self._fill(indices)
            users = self._users_among(indices)
            for placed, count in users.items():
                placed.users += count
            self._stuck.difference_update(users)
            self._mapped.update(indices)

    def unmap(self, indices: range) -> None:
        """Take the memory of consecutive experts; pages that others lie on stay.

        Raises:
            MappingError: an index that is not mapped; then nothing has changed.
        """
        with self._lock:
            self._check(indices)
            self._check_mapped(indices)
            self._mapped.difference_update(indices)
            users = self._users_among(indices)
            for placed, count in users.items():
                placed.users -= count
            self._empty([*(placed for placed in users if not placed.users), *self._stuck])

    def write(self, start: int, values: np.ndarray) -> None:
        """Set the weights of experts start, start + 1, ... to values[count, d_out, d_in].

        Raises:
            ValueError: another shape or dtype than the tensor's.
            MappingError: one of the experts is not mapped.
        """
        with self._lock:
            self.pool.memory.write(self._place_of(start, values), values)

    def begin_write(self, start: int, values: np.ndarray) -> None:
        """Do what `write` does, at the latest when the memory's finish_writes returns."""
        with self._lock:
            self.pool.memory.begin_write(self._place_of(start, values), values)

    def write_array(self, start: int, values: Array) -> None:
        """Do what `write` does with values that lie on the device already."""
        with self._lock:
            self.pool.memory.write_array(self._place_of(start, values), values)

    def close(self) -> None:
        """Give pages and addresses back and make `array` unusable; a second call does nothing."""
        with self._lock:
            if not self._open:
                return
            array, self._array = self._array, None
            if array is not None:
                array.delete()
            self._mapped.clear()
            self._kept = range(0)
            self._empty(set(self._placed.values()))
            self.pool.memory.release(self.address, self._reserved)
            self._open = False

    def check_integrity(self) -> None:
        """Assert that pages, their users and the mapped experts agree."""
        with self._lock:
            users = Counter[_Placed]()
            for _, run in itertools.groupby(
                enumerate(sorted(self._mapped)), lambda at: at[1] - at[0]
            ):
                numbers = [number for _, number in run]
                users.update(self._users_among(range(numbers[0], numbers[-1] + 1)))
            if self._kept:
                users.update(self._users_among(self._kept))
            placed = set(self._placed.values())
            assert {p for p in placed if not p.users} == self._stuck, "a page without users"
            assert users == Counter({p: p.users for p in placed if p.users}), (
                "users of pages differ from the mapped experts"
            )
            numbers = [number for p in placed for number in p.numbers]
            assert sorted(numbers) == sorted(self._placed), "blocks over one another"
            assert len({p.block for p in placed}) == len(placed), "a block lies twice"

    def _check_open(self) -> None:
        if not self._open:
            raise MappingError("the weight tensor is closed")

    def _check(self, indices: range) -> None:
        self._check_open()
        if indices.step != 1 or not 0 <= indices.start < indices.stop <= self.shape[0]:
            raise MappingError(f"experts {indices} are not consecutive in 0..{self.shape[0]}")

    def _place_of(self, start: int, values: np.ndarray | Array) -> int:
        """Return the address of expert `start`; raises unless `values` may be written there."""
        if values.shape[1:] != self.shape[1:] or values.dtype != self.dtype or not len(values):
            raise ValueError(
                f"values {values.dtype}{values.shape} must be {self.dtype}"
                f"(count, {self.shape[1]}, {self.shape[2]})"
            )
        indices = range(start, start + len(values))
        self._check(indices)
        self._check_mapped(indices)
        return self.address + start * self.expert_bytes

    def _check_mapped(self, indices: range) -> None:
        if missing := set(indices) - self._mapped:
            raise MappingError(f"experts {sorted(missing)} are not mapped")

    def _users_among(self, indices: range) -> Counter[_Placed]:
        """Return the blocks under some experts, and on each how many of those experts need it."""
        size, users = self.pool.page_bytes, Counter[_Placed]()
        numbers, end = self._numbers(indices.start, indices.stop), indices.stop
        number = numbers.start
        while number < numbers.stop:
            placed = self._placed[number]
            first = placed.start * size // self.expert_bytes - self._overrun
            first = max(indices.start, first)
            last = min(end, -(-placed.numbers.stop * size // self.expert_bytes))
            users[placed] = last - first
            number = placed.numbers.stop
        return users

    def _numbers(self, start: int, stop: int) -> range:
        """Return the pages that experts start .. stop - 1 need, those of the overrun included."""
        first = start * self.expert_bytes // self.pool.page_bytes
        stop = min(stop + self._overrun, self.shape[0])
        return range(first, -(-stop * self.expert_bytes // self.pool.page_bytes))

    def _fill(self, indices: range) -> None:
        """Map blocks of the pool where experts have no pages: all or none."""
        size, memory = self.pool.page_bytes, self.pool.memory
        cuts = [list(self._cut(run, indices)) for run in self._missing(indices)]
        blocks = self.pool.acquire([len(part) for parts in cuts for part in parts])
        waiting = iter(blocks)
        runs = [[_Placed(part.start, next(waiting)) for part in parts] for parts in cuts]
        done: list[_Placed] = []
        try:
            for run in runs:
                num_bytes = sum(len(placed.numbers) for placed in run) * size
                handles = [placed.block.handle for placed in run]
                memory.map_run(self.address + run[0].start * size, handles, num_bytes)
                self._placed.update((number, placed) for placed in run for number in placed.numbers)
                done += run
                if self._cleared:
                    memory.begin_clear(self.address + run[0].start * size, num_bytes)
        except BaseException:
            for block in blocks[len(done) :]:
                self.pool.release(block)
            self._empty(done)
            raise

    def _missing(self, indices: range) -> Iterator[range]:
        """Yield the runs of pages that experts need and that are not there."""
        numbers = self._numbers(indices.start, indices.stop)
        for missing, run in itertools.groupby(numbers, key=lambda n: n not in self._placed):
            if missing:
                pages = list(run)
                yield range(pages[0], pages[-1] + 1)

    def _cut(self, run: range, indices: range) -> Iterator[range]:
        """Yield the blocks of a run: what lies within these experts in one, the ends by page."""
        size = self.pool.page_bytes
        start = indices.start + (self._overrun if indices.start else 0)  # others' before it
        first = -(-start * self.expert_bytes // size)
        last = max(first, indices.stop * self.expert_bytes // size)
        inner = range(max(run.start, first), min(run.stop, last))
        if not inner:
            yield from (range(number, number + 1) for number in run)
            return
        yield from (range(number, number + 1) for number in range(run.start, inner.start))
        yield inner
        yield from (range(number, number + 1) for number in range(inner.stop, run.stop))

    def _empty(self, unused: Iterable[_Placed]) -> None:
        """Unmap blocks that nobody uses; one that the system keeps stays with the tensor."""
        size = self.pool.page_bytes
        failed: Exception | None = None
        for placed in unused:
            placed.users = 0
            try:
                where = self.address + placed.start * size
                self.pool.memory.unmap(where, placed.block.num_pages * size)
            except Exception as error:
                self._stuck.add(placed)
                failed = error
                continue
            self._stuck.discard(placed)
            for number in placed.numbers:
                del self._placed[number]
            self.pool.release(placed.block)
        if failed:
            raise failed
