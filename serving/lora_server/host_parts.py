"""A rank's parts of adapters in host memory, so that one that comes back is not read again. No jax.

The least valuable ones leave when there are too many bytes (GDSF, adapters.use_ledger).
"""

import collections
import threading

from lora_jax.adapters.use_ledger import UseLedger
from lora_jax.adapters.weights import AdapterWeights

_MOST_GONE = 4096  # parts that left, whose uses are still known


class HostParts:
    """Parts by the digest of their adapter's files; any thread may use it."""

    def __init__(self, byte_budget: int):
        self._byte_budget = byte_budget
        self._lock = threading.Lock()
        self._parts: dict[str, AdapterWeights] = {}
        self._sizes: dict[str, int] = {}  # bytes of each
        self._ledger = UseLedger()
        self._gone: collections.OrderedDict[str, None] = collections.OrderedDict()

    def get(self, digest: str) -> AdapterWeights | None:
        """Return the part if it is here; that is a use of it."""
        with self._lock:
            if digest in self._parts:
                self._ledger.used(digest)
            return self._parts.get(digest)

    def put(self, part: AdapterWeights) -> None:
        """Keep a part that is used now, unless it is larger than all that may be kept."""
        num_bytes = sum(matrix.nbytes for matrix in part.matrices())
        with self._lock:
            self._gone.pop(part.digest, None)
            self._parts[part.digest], self._sizes[part.digest] = part, num_bytes
            self._ledger.used(part.digest)
            while sum(self._sizes.values()) > self._byte_budget:
                self._evict()

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts; their matrices are copies, so nothing else is kept by them."""
        with self._lock:
            return sum(self._sizes.values())

    def _evict(self) -> None:
        """Let the least valuable part go, of equal ones the one that was used longest ago."""
        ledger, sizes = self._ledger, self._sizes
        too_large = [digest for digest, size in sizes.items() if size > self._byte_budget]
        digest = min(
            too_large or sizes,
            key=lambda one: (ledger.value(one, sizes[one]), ledger.last_use(one)),
        )
        ledger.evicted(digest, sizes.pop(digest))
        del self._parts[digest]
        self._gone[digest] = None
        while len(self._gone) > _MOST_GONE:
            ledger.forget(self._gone.popitem(last=False)[0])
