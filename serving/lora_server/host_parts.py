"""A rank's parts of adapters in host memory, so that one that comes back is not read again. No jax.

The least valuable ones leave when there are too many bytes (GDSF, adapters.use_ledger); those that
are held for a load stay, within the same bytes.
"""

import collections
import threading

from lora_jax.adapters.host_memory.use_ledger import UseLedger
from lora_jax.adapters.weights import AdapterWeights

_MOST_GONE = 4096  # parts that left, whose uses are still known


class HostParts:
    """Parts by the digest of their adapter's files; any thread may use it."""

    def __init__(self, byte_budget: int):
        self._byte_budget = byte_budget
        self._lock = threading.Lock()
        self._parts: dict[str, AdapterWeights] = {}
        self._sizes: dict[str, int] = {}  # bytes of each
        self._expected: set[str] = set()  # for a load: `release` has not come yet
        self._held: set[str] = set()  # of these, those that are here
        self._ledger = UseLedger()
        self._gone: collections.OrderedDict[str, None] = collections.OrderedDict()

    def get(self, digest: str) -> AdapterWeights | None:
        """Return the part if it is here; that is a use of it."""
        with self._lock:
            if digest in self._parts:
                self._ledger.used(digest)
            return self._parts.get(digest)

    def put(self, part: AdapterWeights) -> None:
        """Keep a part that is used now, unless those that are held leave too little room for it."""
        with self._lock:
            self._put(part)
            self._make_room()

    def expect(self, digest: str) -> None:
        """Let `hold` hold a part from now on, until `release`."""
        with self._lock:
            self._expected.add(digest)

    def hold(self, part: AdapterWeights) -> bool:
        """Keep an expected part until `release`; False: those that are held leave no room for it.

        It is a use of a part that was not here. The only one that is held may be larger than all
        that may be kept. A part that is not expected any more is kept as others are: its load was
        given up while it was read, and no `release` follows.
        """
        num_bytes = _num_bytes(part)
        with self._lock:
            if part.digest not in self._expected:
                if part.digest not in self._parts:
                    self._put(part)
                    self._make_room()
                return False
            others = sum(self._sizes[digest] for digest in self._held - {part.digest})
            if others and others + num_bytes > self._byte_budget:
                return False
            if part.digest not in self._parts:
                self._put(part)
            self._held.add(part.digest)
            self._make_room()
        return True

    def held(self, digest: str) -> AdapterWeights | None:
        """Return the part if it is held; that is no use of it."""
        with self._lock:
            return self._parts[digest] if digest in self._held else None

    def release(self, digest: str) -> None:
        """Keep a part no longer than others, also one that is still read."""
        with self._lock:
            self._expected.discard(digest)
            self._held.discard(digest)
            self._make_room()

    @property
    def any_held(self) -> bool:
        """True if a part is held."""
        return bool(self._held)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts; their matrices are copies, so nothing else is kept by them."""
        with self._lock:
            return sum(self._sizes.values())

    def _put(self, part: AdapterWeights) -> None:
        self._gone.pop(part.digest, None)
        self._parts[part.digest], self._sizes[part.digest] = part, _num_bytes(part)
        self._ledger.used(part.digest)

    def _make_room(self) -> None:
        while sum(self._sizes.values()) > self._byte_budget and len(self._held) < len(self._parts):
            self._evict()

    def _evict(self) -> None:
        """Let the least valuable part go, of equal ones the one that was used longest ago."""
        ledger, held = self._ledger, self._held
        sizes = {digest: size for digest, size in self._sizes.items() if digest not in held}
        too_large = [digest for digest, size in sizes.items() if size > self._byte_budget]
        digest = min(
            too_large or sizes,
            key=lambda one: (ledger.value(one, sizes[one]), ledger.last_use(one)),
        )
        ledger.evicted(digest, self._sizes.pop(digest))
        del self._parts[digest]
        self._gone[digest] = None
        while len(self._gone) > _MOST_GONE:
            ledger.forget(self._gone.popitem(last=False)[0])


def _num_bytes(part: AdapterWeights) -> int:
    return sum(matrix.nbytes for matrix in part.matrices())
