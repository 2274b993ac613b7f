"""A rank's parts of adapters in host memory, so that one that comes back is not read again. No jax.

The least recently used ones leave when there are too many bytes.
"""

import collections
import threading

from lora_jax.adapters.weights import AdapterWeights


class HostParts:
    """Parts by the digest of their adapter's files; any thread may use it."""

    def __init__(self, byte_budget: int):
        self._byte_budget = byte_budget
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

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts; their matrices are copies, so nothing else is kept by them."""
        return self._num_bytes


def _part_bytes(part: AdapterWeights) -> int:
    return sum(matrix.nbytes for matrix in part.matrices())
