"""An engine's end of processes that hold whole adapters: a process for each, or one for all.

The engine keeps a report of each adapter (names of modules, ranks, a digest) and no weight of it.
"""

import abc
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.registry import AdapterEntry
from lora_jax.adapters.weights import AdapterReport, AdapterWeights
from lora_jax.typing import Array, Int
from serving.lora_server.client import LOCAL

LOST = "The process of this adapter has ended; the request may be tried again."


def numbers_at(site: int, numbers: Int[Array, "rows"], number_bits: int) -> Int[Array, "rows"]:
    """Return the process' number of each row whose adapter has the site, else LOCAL.

    A slot's number has as many low bits for the process, and above them the sites as bits.
    """
    goes = (numbers >= 0) & ((numbers >> (number_bits + site)) & 1 == 1)
    return jnp.where(goes, numbers & ((1 << number_bits) - 1), LOCAL).astype(jnp.int32)


class AbstractWholeSide(abc.ABC):
    """One engine's end, with the interface of `instance.InstanceSide`.

    The engine's thread uses it; `retain`, and what comes with an adapter or leaves, any thread.
    """

    num_local = 0

    def __init__(self, num_slots: int):
        self.wake: Callable[[], None] = lambda: None
        # Called with the name and epoch of an adapter whose process did not answer a step: whoever
        # started it ends it, as it hangs if it is there.
        self.on_lost: Callable[[str, int], None] = lambda name, epoch: None
        self._numbers = np.full(num_slots, LOCAL, np.int32)
        self._changed = False
        self._lock = threading.Lock()
        self._live: dict[str, int] = {}  # requests by digest
        self._dropped: list[tuple[int, str]] = []  # (steps sent by then, digest)

    @abc.abstractmethod
    def lost_epoch(self, name: str) -> int | None:
        """Return the epoch of an adapter whose process does not answer any more; None: it does."""

    @abc.abstractmethod
    def is_ready(self, digest: str) -> bool:
        """True if the process has the adapter and answers."""

    @abc.abstractmethod
    def affected_by(self, status: np.ndarray) -> frozenset[str]:
        """Return the adapters whose requests a step with these statuses may have affected."""

    @abc.abstractmethod
    def close(self) -> None:
        """Let the processes go."""

    @abc.abstractmethod
    def _report(self, name: str) -> AdapterReport | None:
        """Return the report of an adapter by its name."""

    @abc.abstractmethod
    def _number_of(self, digest: str) -> int:
        """Return the number of a slot with the adapter: see numbers_at. LOCAL: it sends nothing."""

    @abc.abstractmethod
    def _free(self) -> None:
        """Let go what has left and is not in use."""

    @property
    @abc.abstractmethod
    def _given_numbers(self) -> list[int]:
        """Numbers or seats of all adapters, also of those that have left and are in use."""

    @property
    @abc.abstractmethod
    def _any_leaving(self) -> bool:
        """True if `_free` may have anything to do later."""

    def read(self, folder: Path, *_: Any, **__: Any) -> AdapterWeights:
        """Return an adapter as an engine without its weights knows it: by its report."""
        report = self._report(Path(folder).name)
        if report is None:
            raise FileNotFoundError(f"no process serves the adapter {Path(folder).name!r}")
        return AdapterWeights({}, report)

    def retain(self, entry: AdapterEntry) -> None:
        """A request of the adapter is queued."""
        with self._lock:
            self._live[entry.digest] = self._live.get(entry.digest, 0) + 1

    def drop(self, digest: str, dispatched: int) -> None:
        """Such a request has ended; `dispatched` steps were sent, which may have rows of it."""
        with self._lock:
            if digest not in self._live:
                return
            self._live[digest] -= 1
            if not self._live[digest]:
                del self._live[digest]
            self._dropped.append((dispatched, digest))

    def collect(self, read: int) -> None:
        """Let go what has left, of which no step under way has rows."""
        with self._lock:
            while self._dropped and self._dropped[0][0] <= read:
                self._dropped.pop(0)
        self._free()

    def keep(self, weights: AdapterWeights) -> AdapterWeights:
        """Return what of an adapter stays here: there is no more than the report."""
        return weights

    def bind(self, slot: int, digest: str) -> None:
        """The adapter, which is ready, is in this slot of the engine's own."""
        number = self._number_of(digest)
        if self._numbers[slot] != number:
            self._numbers[slot] = number
            self._changed = True

    def take_table(self) -> tuple[np.ndarray, int] | None:
        """Return (number of each slot, version) if that has changed since the last call."""
        if not self._changed:
            return None
        self._changed = False
        return self._numbers.copy(), 0

    def take_failures(self) -> list[tuple[str, str]]:
        """Return (digest, why) of adapters whose waiting requests must end."""
        with self._lock:
            live = list(self._live)
        return [(digest, LOST) for digest in live if not self.is_ready(digest)]

    @property
    def is_lost(self) -> bool:
        """True if an adapter with requests is not there."""
        return bool(self.take_failures())

    @property
    def is_busy(self) -> bool:
        """True if `collect` or `take_failures` may have anything to do."""
        return bool(self._dropped or self._any_leaving or (self._live and self.take_failures()))

    def check_integrity(self) -> None:
        """Raise AssertionError when anything is kept for nobody."""
        assert not self._live, f"adapters {sorted(self._live)} are kept for nobody"
        given = self._given_numbers
        assert len(given) == len({*given}), "two adapters have one number"

    def _in_use(self) -> set[str]:
        """Return what live requests and steps under way need; under the lock."""
        return {digest for _, digest in self._dropped} | self._live.keys()

    def _tell_lost(self, names: Iterable[str]) -> None:
        """Tell of those of these adapters whose process does not answer."""
        for name in names:
            epoch = self.lost_epoch(name)
            if epoch is not None:
                self.on_lost(name, epoch)
