"""Composed adapters of requests: made once, kept while they are asked for, bounded. No jax."""

import collections
import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

from lora_jax.adapters.composition import digest_of, pair_of, parts_of, shown, sum_of, union_of
from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.registry_errors import RegistryBusy
from lora_jax.adapters.weights import AdapterWeights, AnyWeights, ExpertWeights

_MOST = 32  # compositions that stay when no request needs them
Parts = Sequence[tuple[AdapterEntry, float]]


class Compositions:
    """Entries of weighted sums of adapters; any thread may call any method."""

    def __init__(
        self,
        check: Callable[[AnyWeights], None],
        keep: Callable[[AnyWeights], AnyWeights],
        *,
        max_rank: int,
        max_bytes: int,
        refused: str | None = None,
    ):
        """`check` and `keep` are those of the registry; `max_bytes` bounds all composed weights.

        `refused` says why this engine composes nothing.
        """
        self._check, self._keep, self._refused = check, keep, refused
        self._max_rank, self._max_bytes = max_rank, max_bytes
        self._making = threading.Lock()  # one sum at a time, held while matrices are copied
        self._lock = threading.Lock()  # guards the fields below, held for moments
        self._entries: collections.OrderedDict[str, AdapterEntry] = collections.OrderedDict()
        self._parts: dict[str, frozenset[str]] = {}  # digests of an entry's parts
        self._live: weakref.WeakValueDictionary[str, AnyWeights] = weakref.WeakValueDictionary()
        self._in_use: Callable[[], Collection[str]] = frozenset
        self.generation = 0  # grows when entries come

    def set_in_use(self, in_use: Callable[[], Collection[str]]) -> None:
        """Ask `in_use` for the digests that live requests need."""
        self._in_use = in_use

    def entry(self, parts: Parts) -> AdapterEntry:
        """Return what serves this weighted sum; one part of weight 1 is that part itself.

        Copies matrices where the sum is new. Raises ValueError for what cannot be composed or never
        fits the device, and RegistryBusy when composed weights in use leave no memory.
        """
        if len(parts) == 1 and parts[0][1] == 1:
            return parts[0][0]
        if self._refused is not None:
            raise ValueError(self._refused)
        headed = next((e.name for e, _ in parts if e.report.head is not None), None)
        if headed is not None:
            raise ValueError(f"{headed!r} has a task head, and is served alone with weight 1.")
        with self._making:
            loras = [(e, weight) for e, weight in parts if isinstance(e.weights, AdapterWeights)]
            esfts = [(e, weight) for e, weight in parts if isinstance(e.weights, ExpertWeights)]
            scaled = next((e.name for e, weight in esfts if weight != 1), None)
            if scaled is not None:
                raise ValueError(f"{scaled!r} is an ESFT adapter, whose weight can only be 1.")
            lora = self._composed(loras) if loras else None
            esft = self._composed(esfts) if esfts else None
            composed = lora or esft
            if composed is None:
                raise ValueError("these adapters cannot be composed.")
            if lora is None or esft is None:
                return composed
            name, digest = _names(parts)
            pair = pair_of(lora, esft, digest, name)
            return dataclasses.replace(
                lora, name=name, kind=AdapterKind.PAIR, digest=digest, weights=pair
            )

    def resolve(
        self, adapter: str | Mapping[str, float], entry_of: Callable[[str], AdapterEntry]
    ) -> AdapterEntry:
        """Return the entry of a name, or of a weighted sum of names."""
        if isinstance(adapter, str):
            return entry_of(adapter)
        return self.entry([(entry_of(part.name), part.weight) for part in parts_of(adapter)])

    def entries(self) -> tuple[AdapterEntry, ...]:
        """Return the composed entries that stay, least recently used first."""
        with self._lock:
            return tuple(self._entries.values())

    def keep_only(self, is_known: Callable[[str], bool]) -> None:
        """Let compositions go of which `is_known` does not hold for every part's digest."""
        with self._lock:
            for digest in [d for d, parts in self._parts.items() if not all(map(is_known, parts))]:
                del self._entries[digest], self._parts[digest]

    def _composed(self, parts: Parts) -> AdapterEntry:
        """Return one entry for parts of one kind."""
        if len(parts) == 1 and parts[0][1] == 1:
            return parts[0][0]
        name, digest = _names(parts)
        with self._lock:
            if digest in self._entries:
                self._entries.move_to_end(digest)
                # Under the names that were asked for: others may stand for the same files.
                return _named(self._entries[digest], name)
            weights = self._live.get(digest)
        if weights is None:
            self._make_room(sum(_size(entry) for entry, _ in parts))
            weights = self._make(parts, digest, name)
        entry = AdapterEntry(name, parts[0][0].kind, digest, 0, weights, False, name)
        with self._lock:
            self._live[digest] = weights
            self._entries[digest] = entry
            self._parts[digest] = frozenset(part.digest for part, _ in parts)
            while len(self._entries) > _MOST:
                oldest, _ = self._entries.popitem(last=False)
                del self._parts[oldest]
            self.generation += 1
        return entry

    def _make(self, parts: Parts, digest: str, name: str) -> AnyWeights:
        loras = [(e.weights, f) for e, f in parts if isinstance(e.weights, AdapterWeights)]
        experts = [e.weights for e, _ in parts if isinstance(e.weights, ExpertWeights)]
        weights: AnyWeights
        weights = (
            sum_of(loras, digest, name, self._max_rank)
            if loras
            else union_of(experts, digest, name)
        )
        self._check(weights)
        return self._keep(weights)

    def _make_room(self, num_bytes: int) -> None:
        """Let compositions go that no request needs; RegistryBusy where that is not enough.

        Raises ValueError where all of the memory is too little.
        """
        if num_bytes > self._max_bytes:
            raise ValueError(
                f"The sum takes {num_bytes} bytes; the limit of memory for composed adapters is "
                f"{self._max_bytes} (a quarter of max_total_adapter_bytes): raise it, or compose "
                "fewer or smaller adapters."
            )
        in_use = set(self._in_use())
        with self._lock:
            while self._held(in_use) + num_bytes > self._max_bytes:
                idle = next((digest for digest in self._entries if digest not in in_use), None)
                if idle is None:
                    raise RegistryBusy(
                        f"The limit of memory for composed adapters is {self._max_bytes} bytes (a "
                        "quarter of max_total_adapter_bytes), which requests use now."
                    )
                del self._entries[idle], self._parts[idle]

    def _held(self, in_use: set[str]) -> int:
        """Return the bytes of sums that stay or are in use; the caller holds the lock."""
        counted = in_use | self._entries.keys()
        return sum(w.report.weight_bytes for d, w in self._live.items() if d in counted)


def _names(parts: Parts) -> tuple[str, str]:
    """Return the name and the digest of a composition."""
    name = shown((entry.name, weight) for entry, weight in parts)
    return name, digest_of((entry.digest, weight) for entry, weight in parts)


def _named(entry: AdapterEntry, name: str) -> AdapterEntry:
    return entry if entry.name == name else dataclasses.replace(entry, name=name, path=name)


def _size(entry: AdapterEntry) -> int:
    """Return the bytes of the entry's matrices in float32."""
    if not isinstance(entry.weights, AdapterWeights):
        return 0  # the union holds the same arrays
    return sum(4 * matrix.size for matrix in entry.weights.matrices())
