"""Expert weights as one array whose shape never changes, with pages only where experts are.

ExpertWeave, section 4.2: a contiguous address range for all experts that may ever be there, and
"Expert-Page Alignment": a page that holds bytes of several experts stays until none is left.
"""

import itertools
import math
import threading
from collections.abc import Iterator

import numpy as np

from lora_jax.memory.pool import Page, PagePool
from lora_jax.memory.virtual import MappingError
from lora_jax.typing import Array


class WeightTensor:
    """[experts_total, d_out, d_in] weights of one layer and projection; safe for threads.

    Experts are mapped, written and unmapped by index; a program may read the mapped ones. The
    caller unmaps and closes only what no step in flight can read (see Retirement).
    """

    def __init__(self, pool: PagePool, shape: tuple[int, int, int], dtype: np.dtype):
        """Reserve the addresses; no page is taken.

        Raises:
            ValueError: a shape that is not three positive numbers.
            OutOfPages: there is no address space for it.
        """
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"shape {shape} must be (experts_total, d_out, d_in), all positive")
        self.pool, self.shape, self.dtype = pool, shape, np.dtype(dtype)
        self.expert_bytes = math.prod(shape[1:]) * self.dtype.itemsize
        self._reserved = -(-shape[0] * self.expert_bytes // pool.page_bytes) * pool.page_bytes
        self._lock = threading.Lock()
        self._mapped: set[int] = set()
        self._pages: dict[int, Page] = {}  # number within the range -> page behind it
        self._users: dict[int, int] = {}  # number within the range -> mapped experts on it
        self._stuck: set[int] = set()  # pages without users that the system would not unmap
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
            return len(self._pages) * self.pool.page_bytes

    def retain_pages(self) -> tuple[dict[int, Page], tuple[int, ...]]:
        """Return the pages by their number within the range, and the mapped experts.

        Each page has one more reference in the pool, the caller's to release: until then nobody
        else gets it, mapped here or not.
        """
        with self._lock:
            pages = {number: page for number, page in self._pages.items() if self._users[number]}
            for page in pages.values():
                self.pool.retain(page)
            return dict(sorted(pages.items())), tuple(sorted(self._mapped))

    def map(self, indices: range) -> None:
        """Give consecutive experts memory, whose contents are undefined until written.

        Raises:
            MappingError: an index outside the tensor, or mapped already.
            OutOfPages: the pool has no room. Either way nothing has changed.
        """
        with self._lock:
            self._check(indices)
            if taken := self._mapped.intersection(indices):
                raise MappingError(f"experts {sorted(taken)} are mapped already")
            users = self._users_of(indices)
            self._fill([number for number in users if number not in self._pages])
            for number, count in users.items():
                self._users[number] += count
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
            users = self._users_of(indices)
            for number, count in users.items():
                self._users[number] -= count
            self._empty([n for n in users if not self._users[n]] + sorted(self._stuck))

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
            self._users = dict.fromkeys(self._pages, 0)
            self._empty(list(self._pages))
            self.pool.memory.release(self.address, self._reserved)
            self._open = False

    def check_integrity(self) -> None:
        """Assert that pages, their users and the mapped experts agree."""
        with self._lock:
            users: dict[int, int] = {}
            for index in self._mapped:
                for number in self._users_of(range(index, index + 1)):
                    users[number] = users.get(number, 0) + 1
            counted = {number: count for number, count in self._users.items() if count}
            assert self._users.keys() - counted.keys() == self._stuck, "a page without users"
            assert users == counted, "users of pages differ from the mapped experts"
            assert self._users.keys() == self._pages.keys(), "a page without a count of users"
            assert len(set(self._pages.values())) == len(self._pages), "a page lies twice"

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

    def _users_of(self, indices: range) -> dict[int, int]:
        """Return the pages under some experts, and on each how many of those experts lie."""
        users: dict[int, int] = {}
        for index in indices:
            first = index * self.expert_bytes // self.pool.page_bytes
            last = ((index + 1) * self.expert_bytes - 1) // self.pool.page_bytes
            for number in range(first, last + 1):
                users[number] = users.get(number, 0) + 1
        return users

    def _fill(self, numbers: list[int]) -> None:
        """Map pages of the pool at the numbers given: all or none."""
        pages = self.pool.acquire(len(numbers))
        size, memory = self.pool.page_bytes, self.pool.memory
        waiting = dict(zip(numbers, pages, strict=True))
        placed: list[int] = []
        try:
            for run in _runs(numbers):
                handles = [waiting[number].handle for number in run]
                memory.map_run(self.address + run[0] * size, handles, size)
                for number in run:
                    self._pages[number] = waiting.pop(number)
                    self._users[number] = 0
                placed += run
        except BaseException:
            for page in waiting.values():
                self.pool.release(page)
            self._empty(placed)
            raise

    def _empty(self, numbers: list[int]) -> None:
        """Unmap pages that nobody uses; one that the system keeps stays with the tensor."""
        size = self.pool.page_bytes
        failed: Exception | None = None
        for number in numbers:
            try:
                self.pool.memory.unmap(self.address + number * size, size)
            except Exception as error:
                self._stuck.add(number)
                failed = error
                continue
            self._stuck.discard(number)
            del self._users[number]
            self.pool.release(self._pages.pop(number))
        if failed:
            raise failed


def _runs(numbers: list[int]) -> Iterator[list[int]]:
    """Yield the runs of consecutive numbers."""
    for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        yield [number for _, number in run]
