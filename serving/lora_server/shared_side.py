"""An engine whose adapters are all in one other process, on a device of its own.

That process is a LoRA Server of one rank that holds whole adapters (`whole_layout`). The engine
keeps a report of each adapter and no weight of it, as beside tenants (`tenant_side`). When the
process ends, all requests with adapters end; base requests lose nothing but one wait, once.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.registry import AdapterEntry
from lora_jax.adapters.weights import AdapterReport, AdapterWeights
from lora_jax.sharding import Split
from lora_jax.typing import Array, Int
from serving.api.config import EngineConfig
from serving.lora_server.client import LOCAL, LayerExchange, RemoteTable
from serving.lora_server.tenant_side import LOST, digest_of
from serving.lora_server.transport import selection
from serving.lora_server.transport.base import (
    AbstractClient,
    PushRows,
    Status,
    TransportError,
)
from serving.lora_server.whole_layout import MOST_SITES, WholeLayout

logger = logging.getLogger(__name__)

# A slot's number: the adapter's in the process, and above it its sites as bits.
NUMBER_BITS = 31 - MOST_SITES
_NUMBER = (1 << NUMBER_BITS) - 1
_JOIN_S = 30.0  # for a process that listens to let the engine in
_LOSS_S = 10.0  # for the end of the process before to be seen
_LOOK_S = 0.02


class SharedLink:
    """Way of a compiled step to the process."""

    has_local = False

    def __init__(self, layout: WholeLayout, client: AbstractClient):
        self.layout, self.client = layout, client

    def start(self, table: RemoteTable, split: Split | None = None) -> "SharedStep":
        """Return what the layers of one step push to; only while that step is traced."""
        assert split is None, "adapters of another process beside several devices"
        return SharedStep(self.layout, self.client, table)


class SharedStep:
    """The `RemoteExperts` of one traced step (nn.remote)."""

    has_local = False

    def __init__(self, layout: WholeLayout, client: AbstractClient, table: RemoteTable):
        self._layout, self._table, self.client = layout, table, client
        self.statuses: list[jax.Array] = []

    def has(self, module: str, layer: int) -> bool:
        """True if the process computes this module of the layer."""
        return self._layout.has(module, layer)

    def exchange(
        self,
        modules: tuple[str, ...],
        layer: int,
        row_to_slot: Int[Array, "rows"],
        row_to_expert: Int[Array, "rows"] | None,
        num_rows: Int[Array, ""],
    ) -> LayerExchange:
        """Return the exchange of one site, for rows whose adapter has the site."""
        site = self._layout.site(modules)
        if row_to_expert is None:
            row_to_expert = jnp.zeros_like(row_to_slot)
        number = self._table.slot_to_number[jnp.maximum(row_to_slot, 0)]
        goes = (row_to_slot >= 0) & (number >= 0) & ((number >> (NUMBER_BITS + site)) & 1 == 1)
        server = jnp.where(goes, 0, -1).astype(jnp.int32)
        adapter = jnp.where(goes, number & _NUMBER, LOCAL).astype(jnp.int32)
        rows = PushRows(num_rows, self._table.version, server, adapter, row_to_expert)
        return LayerExchange(self, site, layer, rows)

    def status(self) -> Int[Array, "servers"]:
        """Return the worst status of the step; 0 where every answer came."""
        worst = jnp.zeros((1,), jnp.int32)
        for status in self.statuses:
            worst = jnp.maximum(worst, status)
        return worst


@dataclasses.dataclass(frozen=True)
class _Held:
    """One adapter of the process."""

    name: str
    epoch: int
    number: int
    report: AdapterReport


class SharedSide:
    """One engine's end, with the interface of `instance.InstanceSide`.

    The engine's thread uses it; `retain`, `sit` and `leave` any thread.
    """

    num_local = 0

    def __init__(self, link: SharedLink, num_slots: int):
        self.link = link
        self.wake: Callable[[], None] = lambda: None
        # Called with the number of an adapter of which no step has rows any more.
        self.on_free: Callable[[int], None] = lambda number: None
        self._numbers = np.full(num_slots, LOCAL, np.int32)
        self._changed = False
        self._lock = threading.Lock()
        self._life = 0  # of the process that is connected
        self._held: dict[str, _Held] = {}  # by digest; one that has left until it is unused
        self._digests: dict[str, str] = {}  # by name
        self._live: dict[str, int] = {}  # requests by digest
        self._dropped: list[tuple[int, str]] = []  # (steps sent by then, digest)

    # Adapters come and go.

    def sit(self, name: str, report: AdapterReport, number: int, epoch: int, life: int) -> str:
        """Take in an adapter that the process holds under a number; return its digest here.

        `life` counts the processes: the engine connects to each once. Raises TransportError where
        it cannot.
        """
        self._connect(life)
        digest = digest_of(f"{name} {epoch}", report.digest)
        kept = dataclasses.replace(report, digest=digest, weight_bytes=0)
        with self._lock:
            self._held[digest] = _Held(name, epoch, number, kept)
            self._digests[name] = digest
        self._free()
        return digest

    def leave(self, name: str, epoch: int) -> bool:
        """Let an adapter go; its number is free when no step can have rows of it.

        Returns False, and does nothing, where one of another epoch has the name.
        """
        with self._lock:
            held = self._held.get(self._digests.get(name, ""))
            if held is None or held.epoch != epoch:
                return False
            del self._digests[name]
        self._free()
        self.wake()
        return True

    def lost_epoch(self, name: str) -> int | None:
        """Return the epoch of an adapter whose process does not answer any more; None: it does."""
        with self._lock:
            held = self._held.get(self._digests.get(name, ""))
        return held.epoch if held is not None and self.link.client.lost() else None

    def read(self, folder: Path, *_: Any, **__: Any) -> AdapterWeights:
        """Return an adapter as an engine without its weights knows it: by its report."""
        name = Path(folder).name
        with self._lock:
            held = self._held.get(self._digests.get(name, ""))
        if held is None:
            raise FileNotFoundError(f"no process serves the adapter {name!r}")
        return AdapterWeights({}, held.report)

    # The interface of InstanceSide.

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
        """Free numbers of adapters that have left, of which no step under way has rows."""
        with self._lock:
            while self._dropped and self._dropped[0][0] <= read:
                self._dropped.pop(0)
        self._free()

    def is_ready(self, digest: str) -> bool:
        """True if the process has the adapter and answers."""
        return self._is_here(digest) and not self.link.client.lost()

    def keep(self, weights: AdapterWeights) -> AdapterWeights:
        """Return what of an adapter stays here: there is no more than the report."""
        return weights

    def bind(self, slot: int, digest: str) -> None:
        """The adapter, which is ready, is in this slot of the engine's own."""
        with self._lock:
            held = self._held.get(digest)
        mask = 0 if held is None else self.link.layout.mask(held.report.modules)
        number = LOCAL if held is None or not mask else held.number | mask << NUMBER_BITS
        if self._numbers[slot] != number:
            self._numbers[slot] = number
            self._changed = True

    def take_table(self) -> tuple[np.ndarray, int] | None:
        """Return (number of each slot, version) if that has changed since the last call."""
        if not self._changed:
            return None
        self._changed = False
        return self._numbers.copy(), 0

    def affected_by(self, status: np.ndarray) -> frozenset[str]:
        """Return the adapters whose requests a step with this status may have affected."""
        if not status.any():
            return frozenset()
        logger.warning("A step failed at the adapters' process (%s).", Status(int(status[0])).name)
        with self._lock:
            return frozenset(self._live)

    def take_failures(self) -> list[tuple[str, str]]:
        """Return (digest, why) of adapters whose waiting requests must end."""
        lost = bool(self.link.client.lost())
        with self._lock:
            live = list(self._live)
        return [(digest, LOST) for digest in live if lost or not self._is_here(digest)]

    @property
    def is_lost(self) -> bool:
        """True if an adapter with requests is not there."""
        return bool(self.take_failures())

    @property
    def is_busy(self) -> bool:
        """True if `collect` or `take_failures` may have anything to do."""
        leaving = len(self._held) > len(self._digests)
        return bool(self._dropped or leaving or (self._live and self.take_failures()))

    def close(self) -> None:
        """Leave the process."""
        self.link.client.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when anything is kept for nobody."""
        assert not self._live, f"adapters {sorted(self._live)} are kept for nobody"
        numbers = [held.number for held in self._held.values()]
        assert len(numbers) == len({*numbers}), "two adapters have one number"

    def _is_here(self, digest: str) -> bool:
        with self._lock:
            held = self._held.get(digest)
            return held is not None and self._digests.get(held.name) == digest

    def _free(self) -> None:
        """Tell of the numbers of adapters that have left and are not in use."""
        with self._lock:
            used = {digest for _, digest in self._dropped} | self._live.keys()
            used |= {*self._digests.values()}
            gone = [self._held.pop(digest) for digest in {*self._held} - used]
        for held in gone:
            self.on_free(held.number)

    def _connect(self, life: int) -> None:
        """Return when the process of this life is connected. Raises TransportError."""
        client = self.link.client
        if life == self._life and not client.lost():
            return
        if life != self._life:
            _wait(client.lost, _LOSS_S, "The engine did not see the adapters' process end.")
        _wait(lambda: not client.rejoin(), _JOIN_S, "The adapters' process did not answer.")
        self._life = life


def _wait(done: Callable[[], object], seconds: float, otherwise: str) -> None:
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= end:
            raise TransportError(otherwise)
        time.sleep(_LOOK_S)


@dataclasses.dataclass(eq=False)
class SharedAccess:
    """The settings of such an engine; `side` is set when the engine is built."""

    max_tenants: int
    wait_s: float  # bound of one exchange
    address: str  # of the process: a Unix socket
    side: SharedSide | None = None
    holds_all = True

    def open(self, config: EngineConfig, dtype: str) -> SharedSide:
        """Return the engine's end, to which no process is connected yet.

        Raises ValueError for what such a process does not serve.
        """
        layout = WholeLayout(config.model)
        terms = layout.terms(config.step_tokens * layout.top_k, dtype, self.max_tenants)
        client = selection.open_client([self.address], terms, separate_stream=False, late=True)
        client.set_limit(self.wait_s)
        self.side = SharedSide(SharedLink(layout, client), config.max_loras)
        return self.side

    def sizes(self, config: EngineConfig) -> dict[str, Any]:
        """Return what the process must know of the engine."""
        assert self.side is not None, "sizes before the engine is built"
        shapes = self.side.link.client.shapes
        sizes = {"max_rows": shapes.max_rows, "dtype": shapes.dtype}
        return sizes | {"max_rank": config.max_lora_rank, "max_tenants": self.max_tenants}

    def read_adapter(self, *given: Any, **more: Any) -> AdapterWeights:
        """Return what the engine may know of an adapter; see SharedSide.read."""
        assert self.side is not None, "an adapter is read before the engine is built"
        return self.side.read(*given, **more)
