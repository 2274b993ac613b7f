"""A rank's parts of adapters in host memory, so that one that comes back is not read again. No jax.

The least recently used ones leave when there are too many bytes.
"""

import collections
import threading
from collections.abc import Callable

from lora_jax.adapters.weights import AdapterWeights


class HostParts:
    """Parts by the digest of their adapter's files; any thread may use it."""

    def __init__(self, byte_budget: int):
        self._byte_budget = byte_budget
        self._reading: dict[str, threading.Lock] = {}  # by digest
        self._lock = threading.Lock()
        self._parts: collections.OrderedDict[str, AdapterWeights] = collections.OrderedDict()
        self._num_bytes = 0

    def get(self, digest: str) -> AdapterWeights | None:
        """Return the part if it is here."""
        with self._lock:
            if digest in self._parts:
                self._parts.move_to_end(digest)
            return self._parts.get(digest)

    def put(self, part: AdapterWeights) -> None:
        """Keep a part, unless it is larger than all that may be kept."""
        with self._lock:
            if (before := self._parts.pop(part.digest, None)) is not None:
                self._num_bytes -= _part_bytes(before)
            self._parts[part.digest] = part
            self._num_bytes += _part_bytes(part)
            while self._num_bytes > self._byte_budget:
                self._num_bytes -= _part_bytes(self._parts.popitem(last=False)[1])

    def fetch(self, digest: str, read: Callable[[], AdapterWeights]) -> AdapterWeights:
        """Return the part, what `read` gives if it is not here; one thread reads it at a time."""
        with self._lock:
            reading = self._reading.setdefault(digest, threading.Lock())
        with reading:
            part = self.get(digest)
            if part is None:
                part = read()
                self.put(part)
            return part

    @property
    def is_full(self) -> bool:
        """Whether one more part of the mean size would drive another one out."""
        with self._lock:
            count, taken = len(self._parts), self.num_bytes
        return count > 0 and taken * (count + 1) > self._byte_budget * count

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts; their matrices are copies, so nothing else is kept by them."""
        return self._num_bytes


def _part_bytes(part: AdapterWeights) -> int:
    return sum(matrix.nbytes for matrix in part.matrices())
