"""Value of adapters in host memory: greedy dual by size and frequency (GDSF). No jax.

value = level at the last use + uses * seconds to read it again / bytes, where the level is the
value of what was evicted last. Cherkasova, "Improving WWW proxies performance with
Greedy-Dual-Size-Frequency caching policy", HP Labs 1998.
"""

import dataclasses
from collections.abc import Callable

# Counts are halved after so many uses, that popularity may drift: for each known digest, at least.
_HALVE_EACH, _HALVE_LEAST = 16, 1000
# What a read takes; only the ratio counts. Measured times would order equal adapters by chance.
_OPEN_S = 0.005  # whatever its size
_RATE = 500e6  # bytes per second


def read_seconds(num_bytes: int) -> float:
    """Return what the policy takes for the time to read so many bytes from files."""
    return _OPEN_S + num_bytes / _RATE


@dataclasses.dataclass
class _Uses:
    """Uses of one digest; `last` grows with every use of any."""

    count: float = 0.0
    level: float = 0.0
    last: int = 0


class UseLedger:
    """Uses by digest, and the level; the caller holds a lock."""

    def __init__(self, seconds: Callable[[int], float] = read_seconds):
        """`seconds` says what it takes to bring so many bytes back."""
        self.level = 0.0
        self._seconds = seconds
        self._uses: dict[str, _Uses] = {}
        self._read: set[str] = set()  # since somebody asked
        self._number = 0
        self._halved = 0  # the number at which counts were halved last
        self.num_halvings = 0  # values only grow in between

    def used(self, digest: str) -> None:
        """Count one use."""
        self._number += 1
        uses = self._uses.setdefault(digest, _Uses())
        uses.count, uses.level, uses.last = uses.count + 1, self.level, self._number
        if self._number - self._halved >= max(_HALVE_LEAST, _HALVE_EACH * len(self._uses)):
            self._halved, self.num_halvings = self._number, self.num_halvings + 1
            for one in self._uses.values():
                one.count /= 2

    def read(self, digest: str) -> None:
        """Note that these weights were read; see `take_read`."""
        self._read.add(digest)

    def take_read(self, digest: str) -> bool:
        """Return, once, whether these weights were read."""
        was_read = digest in self._read
        self._read.discard(digest)
        return was_read

    def evicted(self, digest: str, num_bytes: int) -> None:
        """Raise the level to the value of what goes; its count stays."""
        self.level = max(self.level, self.value(digest, num_bytes))

    def forget(self, digest: str) -> None:
        """No name stands for these weights any more."""
        self._uses.pop(digest, None)
        self._read.discard(digest)

    def value(self, digest: str, num_bytes: int) -> float:
        """Return what the weights are worth in memory; the least valuable go first."""
        uses = self._uses.get(digest, _Uses())
        return uses.level + uses.count * self._seconds(num_bytes) / max(num_bytes, 1)

    def last_use(self, digest: str) -> int:
        """Return a number that grows with every use; 0: never used."""
        return self._uses[digest].last if digest in self._uses else 0
