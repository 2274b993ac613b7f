"""Coordinator: adapters that all ranks of a LoRA Server hold, and their leases. No jax.

An instance leases an adapter before it sends a row of it, so that what is in use stays. Of the
others the least recently leased goes when a place is needed. All ranks hold the same adapters under
the same numbers; a number is never given twice. Files of some adapters are read side by side. Their
parts go onto the ranks one adapter after another, because their order decides what has room. Leases
of what is held are given meanwhile.
"""

import collections
import dataclasses
import logging
import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from lora_jax.adapters.host_memory.read_turns import ReadTurns
from serving.lora_server.lease_metrics import LeaseMetrics, PartLoad

logger = logging.getLogger(__name__)

_RANK_LOST = "A rank of the LoRA Server is not there."
_NO_ROOM = "All {} adapters on the LoRA Server are in use."
AT_ONCE = 4  # adapters that are read side by side, at most
_WAITING = 32  # threads of requests: several instances may wait for one adapter


class NoRoom(RuntimeError):
    """Every adapter on the server is in use; a lease may succeed later."""


class RankControl(Protocol):
    """One rank as the coordinator sees it; see server.RankServer."""

    def fetch(self, folder: str, digest: str) -> PartLoad: ...

    def forget(self, digest: str) -> None: ...

    def load(self, number: int, folder: str, digest: str, version: int) -> PartLoad: ...

    def unload(self, number: int, version: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class Lease:
    """The number under which the server knows an adapter, from a version of its table on."""

    number: int
    version: int


class LeaseSource(Protocol):
    """Request of an instance; `instance` is its unique name."""

    def lease(self, instance: str, digest: str, folder: str) -> Lease: ...

    def release(self, instance: str, digest: str) -> None: ...

    def leave(self, instance: str) -> None: ...


@dataclasses.dataclass(eq=False)
class _Held:
    """An adapter on all ranks that are there."""

    number: int
    version: int  # of the table, in which it stands since
    folder: str
    leases: set[str] = dataclasses.field(default_factory=set)  # instances


class Coordinator:
    """The server's table; any thread may call it."""

    def __init__(self, ranks: Sequence[RankControl], num_adapters: int):
        """`num_adapters` is that of every rank."""
        self.metrics = LeaseMetrics()
        self._ranks: list[RankControl | None] = list(ranks)
        self._num_adapters = num_adapters
        self._turns = ReadTurns(AT_ONCE)  # of digests, held until they are loaded
        self._changing = threading.Lock()  # what the ranks hold; taken before the next one
        self._lock = threading.RLock()  # the fields below, held for moments
        self._requested: dict[tuple[str, str], Future[Lease]] = {}  # by instance and digest
        self._unwanted: set[tuple[str, str]] = set()  # of those, given back while they load
        self._held: collections.OrderedDict[str, _Held] = collections.OrderedDict()
        self._generations = [0] * num_adapters  # by place
        self._version = 0
        threads = len(self._ranks) * (AT_ONCE + 1)  # the reads, and one load or unload
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="lora-server-load")
        self._requests = ThreadPoolExecutor(_WAITING, thread_name_prefix="lora-server-request")

    def lease(self, instance: str, digest: str, folder: str) -> Lease:
        """Return the adapter's number, having loaded it from `folder` if it was not held.

        Raises NoRoom, ValueError when a rank refuses the files, and ConnectionError when a rank is
        not there; then nothing is leased. An instance holds one lease per adapter at most.
        """
        lease = self._give(instance, digest)
        if lease is not None:
            self.metrics.held()
            return lease
        with self._turns.turn(digest):
            lease = self._give(instance, digest)
            if lease is not None:  # another has loaded it meanwhile
                self.metrics.held()
                return lease
            return self._bring(instance, digest, folder)

    def request(self, instance: str, digest: str, folder: str) -> Lease | None:
        """Return what `lease` does, or raise it, if that is known; else find out on a thread."""
        key = instance, digest
        with self._lock:
            lease = self._give(instance, digest)
            self._unwanted.discard(key)
            if lease is None and key not in self._requested:
                self._requested[key] = future = self._requests.submit(self.lease, *key, folder)
                future.add_done_callback(lambda _: self._drop_unwanted(key))
            elif lease is not None and key not in self._requested:
                self.metrics.held()
            future = self._requested.get(key)
            if future is None or not future.done():
                return lease
            del self._requested[key]
        return lease or future.result()

    def release(self, instance: str, digest: str) -> None:
        """Give a lease back; the adapter stays while there is room. Unknown ones are ignored."""
        key = instance, digest
        with self._lock:
            if digest in self._held:
                self._held[digest].leases.discard(instance)
            future = self._requested.get(key)
            if future is None:
                return
            if future.done() or future.cancel():
                del self._requested[key]
            else:
                self._unwanted.add(key)

    def leave(self, instance: str) -> None:
        """Give all leases of an instance back, which is gone."""
        with self._lock:
            digests = [digest for name, digest in self._requested if name == instance]
            digests += [digest for digest, held in self._held.items() if instance in held.leases]
        for digest in digests:
            self.release(instance, digest)

    def lose(self, rank: int) -> None:
        """A rank is gone; nothing is leased until `restore`."""
        with self._lock:
            self._ranks[rank] = None

    def restore(self, rank: int, control: RankControl) -> None:
        """A rank has come back empty: load all it should hold.

        An adapter that it refuses, as one whose folder has changed or gone, is held by none from
        now on: instances that lease it are refused its rows, and ask anew. Raises ConnectionError
        when the rank does not answer; it then is still lost.
        """
        with self._changing:
            for digest, held in list(self._held.items()):
                try:
                    control.load(held.number, held.folder, digest, self._version)
                except ValueError as error:
                    logger.warning("The LoRA Server drops adapter %s: %s", digest[:12], error)
                    with self._lock:
                        del self._held[digest]
                    self._unload(held.number)
            with self._lock:
                self._ranks[rank] = control

    def held(self) -> dict[str, frozenset[str]]:
        """Return the instances that lease each adapter, by digest."""
        with self._lock:
            return {digest: frozenset(held.leases) for digest, held in self._held.items()}

    def close(self) -> None:
        """End the threads that load."""
        self._requests.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False)

    def holds(self, digest: str) -> bool:
        """True if the adapter is on all ranks that are there."""
        with self._lock:
            return digest in self._held

    def _drop_unwanted(self, key: tuple[str, str]) -> None:
        """A request has ended: give back what it brought, if that was given back meanwhile."""
        with self._lock:
            if key in self._unwanted:
                self._unwanted.remove(key)
                self.release(*key)

    def _give(self, instance: str, digest: str) -> Lease | None:
        """Return a lease of an adapter that is held."""
        with self._lock:
            if any(rank is None for rank in self._ranks):
                raise ConnectionError(_RANK_LOST)
            if digest not in self._held:
                return None
            self._held.move_to_end(digest)
            self._held[digest].leases.add(instance)
            return Lease(self._held[digest].number, self._held[digest].version)

    def _bring(self, instance: str, digest: str, folder: str) -> Lease:
        """Return a lease of an adapter that is not held, once it is loaded.

        Its files are read beside those of others, and before any adapter leaves for it.
        """
        self._require_place()
        try:
            fetched, errors = self._everywhere(operator.methodcaller("fetch", folder, digest))
            _require_answers(errors)
            if errors:
                raise errors[0]
            with self._changing:
                loaded = self._load(digest, folder)
                lease = self._give(instance, digest)
        finally:
            self._everywhere(operator.methodcaller("forget", digest))
        read_s = max((part.read_s for part in (*fetched, *loaded)), default=0.0)
        seconds = (max((p.load_s for p in parts), default=0.0) for parts in (fetched, loaded))
        self.metrics.loaded([PartLoad(read_s, sum(seconds))])
        assert lease is not None, "an adapter has gone while nothing could change"
        return lease

    def _require_place(self) -> None:
        """Raise NoRoom when no adapter could leave for another one: its files need not be read."""
        with self._lock:
            if len(self._held) >= self._num_adapters and all(h.leases for h in self._held.values()):
                raise NoRoom(_NO_ROOM.format(len(self._held)))

    def _load(self, digest: str, folder: str) -> list[PartLoad]:
        """Bring the adapter onto all ranks, evicting idle ones until it fits."""
        while True:
            if len(self._held) >= self._num_adapters:
                self._evict()
            number = self._take_number()
            self._version += 1
            load = operator.methodcaller("load", number, folder, digest, self._version)
            parts, errors = self._everywhere(load)
            if not errors:
                with self._lock:
                    self._held[digest] = _Held(number, self._version, folder)
                return parts
            self._unload(number)
            _require_answers(errors)
            if not any(_is_room(error) for error in errors):
                raise errors[0]
            self._evict()

    def _evict(self) -> None:
        with self._lock:
            idle = next((d for d, held in self._held.items() if not held.leases), None)
            if idle is None:
                raise NoRoom(_NO_ROOM.format(len(self._held)))
            gone = self._held.pop(idle)
        self._unload(gone.number)

    def _unload(self, number: int) -> None:
        self._version += 1
        self._everywhere(operator.methodcaller("unload", number, self._version))

    def _take_number(self) -> int:
        taken = {held.number % self._num_adapters for held in self._held.values()}
        index = next(index for index in range(self._num_adapters) if index not in taken)
        self._generations[index] += 1
        return self._generations[index] * self._num_adapters + index

    def _everywhere(self, call: Callable[[RankControl], Any]) -> tuple[list[Any], list[Exception]]:
        """Run a call on all ranks at once; return what they gave and what went wrong."""
        futures = [self._pool.submit(call, rank) for rank in self._ranks if rank is not None]
        wait(futures)
        given = [future.result() for future in futures if future.exception() is None]
        outcomes = [future.exception() for future in futures]
        errors = [error for error in outcomes if isinstance(error, Exception)]
        unexpected = [e for e in errors if not isinstance(e, ValueError | ConnectionError)]
        if unexpected:
            raise unexpected[0]
        return given, errors


def _require_answers(errors: Sequence[Exception]) -> None:
    """Raise ConnectionError when not all ranks have answered."""
    lost = [error for error in errors if not isinstance(error, ValueError)]
    if lost:
        raise ConnectionError(_RANK_LOST) from lost[0]


def _is_room(error: Exception) -> bool:
    """True if a rank refused for want of room that others' going would make."""
    return "There is no room" in str(error)
