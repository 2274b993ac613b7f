"""An instance's leases on a LoRA Server: asked for when a request is queued, on a thread. No jax.

So the server loads a cold adapter while the request still waits (InfiniLoRA, section 5.3: the
scheduler's out-of-band signal), and no step waits for a lease.
"""

import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable

from serving.lora_server.coordinator import Lease, LeaseSource, NoRoom

logger = logging.getLogger(__name__)

_RETRY_S = 0.003  # while an adapter is on its way, or the server has no room


@dataclasses.dataclass(eq=False)
class _Wanted:
    """An adapter that live requests need."""

    folder: str
    requests: int = 0
    asked: bool = False  # since the last request came
    lease: Lease | None = None
    error: str | None = None


class Leases:
    """Leases: adapters whose rows an instance may send; any thread may call it."""

    def __init__(
        self,
        source: LeaseSource,
        instance: str,
        on_change: Callable[[], None] = lambda: None,
        *,
        prefetch: bool = True,
    ):
        """`on_change` is called, on the thread, whenever a lease came or was refused.

        Without `prefetch` a lease is asked for when `get` is first called: for comparison only.
        """
        self._source, self._instance, self._on_change = source, instance, on_change
        self._prefetch = prefetch
        self._lock = threading.Lock()
        self._wanted: dict[str, _Wanted] = {}
        self._work: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # digests to look at
        self._later: dict[str, None] = {}  # those to look at again, each once
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lora-server-leases", daemon=True)
        self._thread.start()

    def retain(self, digest: str, folder: str) -> None:
        """Lease the adapter, whose files are in `folder`, until `drop` is called as often."""
        with self._lock:
            wanted = self._wanted.setdefault(digest, _Wanted(folder))
            wanted.requests += 1
            wanted.asked = self._prefetch
            if wanted.lease is None and wanted.asked:
                self._work.put(digest)

    def drop(self, digest: str) -> None:
        """A request that needed the adapter has ended, and no step has rows of it any more."""
        with self._lock:
            wanted = self._wanted[digest]
            wanted.requests -= 1
            if not wanted.requests:
                self._work.put(digest)

    def get(self, digest: str) -> Lease | None:
        """Return the lease; None while there is none."""
        with self._lock:
            wanted = self._wanted.get(digest)
            if wanted is None:
                return None
            if wanted.lease is None and not wanted.asked:
                wanted.asked = True
                self._work.put(digest)
            return wanted.lease

    def take_errors(self) -> list[tuple[str, str]]:
        """Return, once, (digest, why) of the adapters that the server will not lease.

        They are asked for again when the next request wants them.
        """
        with self._lock:
            failed = [(d, w.error) for d, w in self._wanted.items() if w.error is not None]
            for digest, _ in failed:
                self._wanted[digest].error = None
        return [(digest, str(error)) for digest, error in failed]

    @property
    def has_errors(self) -> bool:
        """True if `take_errors` would return any."""
        with self._lock:
            return any(wanted.error is not None for wanted in self._wanted.values())

    def renew(self) -> None:
        """Ask for every lease again: the server may have forgotten them."""
        with self._lock:
            for digest, wanted in self._wanted.items():
                wanted.lease = None
                self._work.put(digest)

    @property
    def digests(self) -> frozenset[str]:
        """Adapters that live requests need."""
        with self._lock:
            return frozenset(d for d, wanted in self._wanted.items() if wanted.requests)

    def close(self) -> None:
        """End the thread and give all leases back."""
        self._closing.set()
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        due = math.inf  # by time.monotonic: all of `_later` are looked at then
        while not self._closing.is_set():
            due = min(due, time.monotonic() + _RETRY_S) if self._later else math.inf
            wait_s = due - time.monotonic()
            if wait_s <= 0:  # also while work comes without a pause
                later, self._later, due = self._later, {}, math.inf
                for digest in later:
                    self._look_at(digest)
                continue
            try:
                digest = self._work.get(timeout=None if due == math.inf else wait_s)
            except queue.Empty:
                continue
            if digest is not None:
                self._look_at(digest)
        try:
            self._source.leave(self._instance)
        except ConnectionError:
            logger.info("The LoRA Server stopped before this instance.")

    def _look_at(self, digest: str) -> None:
        """Make what is leased agree with what is wanted."""
        with self._lock:
            wanted = self._wanted.get(digest)
            if wanted is None:
                return
            needed, has = wanted.requests > 0, wanted.lease is not None
            if not needed:
                del self._wanted[digest]
        try:
            if needed and not has:
                self._ask(digest, wanted)
            elif not needed:
                self._source.release(self._instance, digest)
        except ConnectionError as error:
            self._refused(wanted, error)

    def _ask(self, digest: str, wanted: _Wanted) -> None:
        try:
            lease = self._source.lease(self._instance, digest, wanted.folder)
        except NoRoom:
            self._later[digest] = None
            return
        except ValueError as error:
            self._refused(wanted, error)
            return
        with self._lock:
            wanted.lease = lease
        self._on_change()

    def _refused(self, wanted: _Wanted, error: Exception) -> None:
        logger.warning("No lease on an adapter: %s", error)
        with self._lock:
            wanted.error = str(error)
        self._on_change()
