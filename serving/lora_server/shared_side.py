"""An engine whose adapters are all in one other process, on a device of its own.

That process is a LoRA Server of one rank that holds whole adapters (`whole_layout`). When it ends,
all requests with adapters end; base requests lose nothing but one wait, once.
"""

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.weights import AdapterReport, AdapterWeights
from lora_jax.sharding import Split
from lora_jax.typing import Array, Int
from serving.api.config import EngineConfig
from serving.lora_server.client import LOCAL, AbstractStep, RemoteTable
from serving.lora_server.tenant_side import digest_of
from serving.lora_server.transport import selection
from serving.lora_server.transport.base import (
    AbstractClient,
    PushRows,
    Status,
    TransportError,
)
from serving.lora_server.whole_layout import MOST_SITES, WholeLayout
from serving.lora_server.whole_side import AbstractWholeSide, numbers_at

logger = logging.getLogger(__name__)

# A slot's number: the adapter's in the process, and above it its sites as bits.
NUMBER_BITS = 31 - MOST_SITES
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


class SharedStep(AbstractStep[WholeLayout]):
    """One step's way to the process, for rows whose adapter has the site."""

    def _destination(
        self,
        modules: tuple[str, ...],
        layer: int,
        numbers: Int[Array, "rows"],
        row_to_expert: Int[Array, "rows"],
        num_rows: Int[Array, ""],
    ) -> tuple[int, int, PushRows]:
        site = self._layout.site(modules)
        adapter = numbers_at(site, numbers, NUMBER_BITS)
        server = jnp.where(adapter == LOCAL, -1, 0).astype(jnp.int32)
        rows = PushRows(num_rows, self._table.version, server, adapter, row_to_expert)
        return site, layer, rows


@dataclasses.dataclass(frozen=True)
class _Held:
    """One adapter of the process."""

    name: str
    epoch: int
    life: int  # of the process
    number: int
    report: AdapterReport


class SharedSide(AbstractWholeSide):
    """One engine's end of the process; `sit` and `leave` are for any thread."""

    def __init__(self, link: SharedLink, num_slots: int):
        super().__init__(num_slots)
        self.link = link
        # Called with the number of an adapter of which no step has rows any more.
        self.on_free: Callable[[int], None] = lambda number: None
        self._life = 0  # of the process that is connected
        self._held: dict[str, _Held] = {}  # by digest; one that has left until it is unused
        self._digests: dict[str, str] = {}  # by name

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
            self._held[digest] = _Held(name, epoch, life, number, kept)
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
        if held is None or not (held.life != self._life or self.link.client.lost()):
            return None
        return held.epoch

    # What AbstractWholeSide asks for.

    def is_ready(self, digest: str) -> bool:
        """True if the process has the adapter and answers.

        A process that has come back does not have what the one before had.
        """
        with self._lock:
            held = self._held.get(digest)
            is_here = held is not None and self._digests.get(held.name) == digest
        return held is not None and is_here and held.life == self._life and not self._is_away

    def affected_by(self, status: np.ndarray) -> frozenset[str]:
        """Return the adapters whose requests a step with this status may have affected."""
        if not status.any():
            return frozenset()
        logger.warning("A step failed at the adapters' process (%s).", Status(int(status[0])).name)
        with self._lock:
            live, names = frozenset(self._live), list(self._digests)
        self._tell_lost(names)
        return live

    def close(self) -> None:
        """Leave the process."""
        self.link.client.close()

    @property
    def _given_numbers(self) -> list[int]:
        return [held.number for held in self._held.values()]

    def _report(self, name: str) -> AdapterReport | None:
        with self._lock:
            held = self._held.get(self._digests.get(name, ""))
        return None if held is None else held.report

    def _number_of(self, digest: str) -> int:
        with self._lock:
            held = self._held.get(digest)
        mask = 0 if held is None else self.link.layout.mask(held.report.modules)
        return held.number | mask << NUMBER_BITS if held is not None and mask else LOCAL

    def _free(self) -> None:
        """Tell of the numbers of adapters that have left and are not in use."""
        with self._lock:
            used = self._in_use() | {*self._digests.values()}
            gone = [self._held.pop(digest) for digest in {*self._held} - used]
        for held in gone:
            self.on_free(held.number)

    @property
    def _any_leaving(self) -> bool:
        return len(self._held) > len(self._digests)

    @property
    def _is_away(self) -> bool:
        return bool(self.link.client.lost())

    def _connect(self, life: int) -> None:
        """Return when the process of this life is connected. Raises TransportError."""
        client = self.link.client
        if life < self._life:  # its start was slower than the end of its process
            raise TransportError("The adapters' process has ended, and there is a new one.")
        if life > self._life:
            _wait(client.lost, _LOSS_S, "The engine did not see the adapters' process end.")
            self._life = life  # before it answers: it has nothing of what the one before had
        if client.lost():
            _wait(lambda: not client.rejoin(), _JOIN_S, "The adapters' process did not answer.")


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
