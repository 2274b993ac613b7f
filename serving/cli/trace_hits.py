"""A trace of requests, and in which tier each of them finds its adapter. No jax."""

import collections
import gzip
import heapq
import itertools
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lora_jax.adapters.host_memory.use_ledger import UseLedger

_MOST_REQUESTS = 10_000_000
_MOST_NAME = 256  # characters


class TierHits(NamedTuple):
    """Requests of a trace by the tier that has their adapter; `first` of those of the disk are the
    first ones for an adapter."""

    device: int
    host: int
    disk: int
    first: int


def read_trace(path: str) -> tuple[str, ...]:
    """Return the adapters that the requests of a file name, in its order.

    Each line is one name; empty lines are passed over; `.gz` files are unpacked. Raises OSError for
    files that cannot be read and ValueError for what is no such file.
    """
    names: list[str] = []
    shared: dict[str, str] = {}  # one text for each name
    number = 0  # of the line, from 1 on
    try:
        with gzip.open(path, "rb") if path.endswith(".gz") else Path(path).open("rb") as lines:
            while line := lines.readline(4 * _MOST_NAME):
                number += 1
                name = line.decode().strip()
                if len(name) > _MOST_NAME or (not line.endswith(b"\n") and lines.read(1)):
                    raise ValueError(f"line {number} has over {_MOST_NAME} characters.")
                if name:
                    names.append(shared.setdefault(name, name))
                if len(names) > _MOST_REQUESTS:
                    raise ValueError(f"it has more than {_MOST_REQUESTS} requests.")
    except UnicodeDecodeError:
        raise ValueError(f"line {number} is no UTF-8 text.") from None
    except (EOFError, zlib.error):
        raise ValueError("it is no whole gzip file.") from None
    if not names:
        raise ValueError("it names no adapter.")
    return tuple(names)


def tier_hits(asked: Iterable[str], on_device: int, on_host: int, num_bytes: int) -> TierHits:
    """Return where requests find adapters of `num_bytes` each, one after another.

    The longest unused adapter leaves the device, the least valuable one the host (GDSF, see
    `lora_jax.adapters.host_memory.use_ledger`). Nothing is in memory at first.
    """
    device: collections.OrderedDict[str, None] = collections.OrderedDict()
    host, seen = _Host(on_host, num_bytes), set()
    counts = collections.Counter[str]()
    for name in asked:
        in_host = host.use(name)
        counts["device" if name in device else "host" if in_host else "disk"] += 1
        counts["first"] += name not in seen
        seen.add(name)
        device[name] = None
        device.move_to_end(name)
        if len(device) > on_device:
            device.popitem(last=False)
    return TierHits(counts["device"], counts["host"], counts["disk"], counts["first"])


class _Host:
    """Names in host memory. The heap has values as they were, which only grow until a halving."""

    def __init__(self, capacity: int, num_bytes: int):
        self._capacity, self._num_bytes = capacity, num_bytes
        self._ledger = UseLedger()
        self._there: set[str] = set()
        self._heap: list[tuple[float, int, int, str]] = []
        self._numbers = itertools.count()  # of entries; names are not compared
        self._halvings = 0

    def use(self, name: str) -> bool:
        """Return whether the name is here, and have it here from now on."""
        found = name in self._there
        if not found and self._capacity:
            if len(self._there) >= self._capacity:
                self._evict()
            self._there.add(name)
        self._ledger.used(name)
        if not found and self._capacity:
            self._push(name)
        return found

    def _push(self, name: str) -> None:
        heapq.heappush(self._heap, (*self._worth(name), next(self._numbers), name))

    def _worth(self, name: str) -> tuple[float, int]:
        return self._ledger.value(name, self._num_bytes), self._ledger.last_use(name)

    def _evict(self) -> None:
        if self._halvings != self._ledger.num_halvings:
            self._halvings = self._ledger.num_halvings
            self._heap.clear()
            for name in self._there:
                self._push(name)
        while True:
            *worth, _, name = heapq.heappop(self._heap)
            if tuple(worth) == self._worth(name):
                break
            self._push(name)
        self._there.remove(name)
        self._ledger.evicted(name, self._num_bytes)
