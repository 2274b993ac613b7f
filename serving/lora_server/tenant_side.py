"""An engine whose adapters are all in tenants' processes: `isolation=server` of functions.

To the layers a tenant is a LoRA Server that holds one whole adapter. The engine keeps a report of
the adapter (names of modules, ranks, a digest) and no weight of it. A tenant that ends, or does not
answer in time, ends its own requests; others lose nothing but that wait, once.
"""

import dataclasses
import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.added_tokens import AddedToken
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.registry import AdapterEntry
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, ModuleReport
from lora_jax.models.loader import read_config
from lora_jax.sharding import Split
from lora_jax.typing import Array, Int
from serving.api.config import EngineConfig
from serving.lora_server.client import LOCAL, LayerExchange, RemoteTable
from serving.lora_server.tenant_adapter import layout_of
from serving.lora_server.tenant_layout import TenantLayout
from serving.lora_server.transport.base import AbstractClient, PushRows, Status
from serving.lora_server.transport.tenants import Seat, TenantClient

logger = logging.getLogger(__name__)

LOST = "The process of this adapter has ended; the request may be tried again."
_SEAT_BITS = 8
MOST_TENANTS = 1 << _SEAT_BITS


class SeatsTaken(ValueError):
    """As many tenants are there as may be; another one may come when one has left."""

    retry_after_s = 1.0


class TenantLink:
    """Way of a compiled step to all tenants."""

    has_local = False

    def __init__(self, layout: TenantLayout, client: TenantClient):
        self.layout, self.client = layout, client

    def start(self, table: RemoteTable, split: Split | None = None) -> "TenantStep":
        """Return what the layers of one step push to; only while that step is traced."""
        assert split is None, "tenants beside several devices"
        return TenantStep(self.layout, self.client, table)


class TenantStep:
    """The `RemoteExperts` of one traced step (nn.remote)."""

    has_local = False

    def __init__(self, layout: TenantLayout, client: TenantClient, table: RemoteTable):
        self._layout, self._table = layout, table
        self.client: AbstractClient = client
        self.statuses: list[jax.Array] = []

    def has(self, module: str, layer: int) -> bool:
        """True if tenants compute this module of the layer."""
        return self._layout.has(module, layer)

    def exchange(
        self,
        modules: tuple[str, ...],
        layer: int,
        row_to_slot: Int[Array, "rows"],
        row_to_expert: Int[Array, "rows"] | None,
        num_rows: Int[Array, ""],
    ) -> LayerExchange:
        """Return the exchange of one site: each row goes to its tenant, if that has the site."""
        site = self._layout.site(modules)
        if row_to_expert is None:
            row_to_expert = jnp.zeros_like(row_to_slot)
        number = self._table.slot_to_number[jnp.maximum(row_to_slot, 0)]
        goes = (row_to_slot >= 0) & (number >= 0) & ((number >> (_SEAT_BITS + site)) & 1 == 1)
        seat = jnp.where(goes, number & (MOST_TENANTS - 1), -1).astype(jnp.int32)
        owners = seat, row_to_expert
        rows = PushRows(num_rows, self._table.version, seat, *owners)
        return LayerExchange(self, site, layer, rows)

    def status(self) -> Int[Array, "servers"]:
        """Return the worst status of each seat in the step; 0 where every answer came."""
        worst = jnp.zeros((self.client.servers,), jnp.int32)
        for status in self.statuses:
            worst = jnp.maximum(worst, status)
        return worst


class TenantSide:
    """One engine's end of its tenants, with the interface of `instance.InstanceSide`.

    The engine's thread uses it; `retain`, `sit` and `leave` any thread.
    """

    num_local = 0

    def __init__(self, link: TenantLink, num_slots: int):
        self.link = link
        self.wake: Callable[[], None] = lambda: None
        self._numbers = np.full(num_slots, LOCAL, np.int32)
        self._changed = False
        self._lock = threading.Lock()
        self._seats: dict[str, int] = {}  # by digest; one that has left keeps it until unused
        self._reports: dict[str, AdapterReport] = {}  # by name of the adapter
        self._epochs: dict[str, int] = {}  # of its process, by the same
        self._left: set[str] = set()
        self._live: dict[str, int] = {}  # requests by digest
        self._dropped: list[tuple[int, str]] = []  # (steps sent by then, digest)

    # Tenants come and go.

    def seat_of(self, name: str, digest: str) -> tuple[int, int]:
        """Return a seat for the adapter and the last epoch there. Raises SeatsTaken."""
        key, client = digest_of(name, digest), self.link.client
        with self._lock:
            self._left.discard(key)
            if key not in self._seats:
                free = set(range(client.servers)) - {*self._seats.values()}
                if not free:
                    raise SeatsTaken(
                        f"All {client.servers} seats of this backbone are taken: try again when a "
                        "function has ended, close one, or start with a larger max_tenants."
                    )
                self._seats[key] = min(free)
            return self._seats[key], client.last_epoch(self._seats[key])

    def sit(self, name: str, report: AdapterReport, seat: Seat) -> None:
        """Take an adapter's process in. Raises TransportError, and SeatsTaken.

        The descriptors are closed, unless `seat_of` raises.
        """
        key = digest_of(name, report.digest)
        number, _ = self.seat_of(name, report.digest)
        try:
            self.link.client.sit(number, seat, lambda: self.wake())
        except BaseException:
            with self._lock:
                if all(known.digest != key for known in self._reports.values()):
                    self._left.add(key)
                    self._free_seats()
            raise
        with self._lock:
            old = self._reports.get(name)
            if old is not None and old.digest != key:  # other files under the same name
                self._left.add(old.digest)
                self._free_seats()
            self._epochs[name] = seat.epoch
            self._reports[name] = dataclasses.replace(report, digest=key, weight_bytes=0)

    def leave(self, name: str, epoch: int) -> bool:
        """Let an adapter's process go; its seat is free when no step can have rows of it.

        Returns False, and does nothing, where a process of another epoch has the name.
        """
        with self._lock:
            if self._epochs.get(name) != epoch:
                return False
            del self._epochs[name]
            report = self._reports.pop(name)
            self._left.add(report.digest)
            number = self._seats[report.digest]
            self._free_seats()
        self.link.client.rise(number)
        return True

    def lost_epoch(self, name: str) -> int | None:
        """Return the epoch of an adapter's process that does not answer any more; None: it does."""
        with self._lock:
            report, epoch = self._reports.get(name), self._epochs.get(name)
            seat = None if report is None else self._seats.get(report.digest)
        lost = seat is not None and self.link.client.is_lost(seat)
        return epoch if lost else None

    def read(self, folder: Path, *_: Any, **__: Any) -> AdapterWeights:
        """Return an adapter as an engine without its weights knows it: by its report."""
        with self._lock:
            report = self._reports.get(Path(folder).name)
        if report is None:
            raise FileNotFoundError(f"no process serves the adapter {Path(folder).name!r}")
        return AdapterWeights({}, report)

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
        """Free seats of adapters that have left, of which no step under way has rows."""
        with self._lock:
            while self._dropped and self._dropped[0][0] <= read:
                self._dropped.pop(0)
            self._free_seats()

    def is_ready(self, digest: str) -> bool:
        """True if the adapter's process is there."""
        with self._lock:
            number = self._seats.get(digest)
        return number is not None and not self.link.client.is_lost(number)

    def keep(self, weights: AdapterWeights) -> AdapterWeights:
        """Return what of an adapter stays here: there is no more than the report."""
        return weights

    def bind(self, slot: int, digest: str) -> None:
        """The adapter, which is ready, is in this slot of the engine's own."""
        with self._lock:
            report = next((r for r in self._reports.values() if r.digest == digest), None)
            mask = 0 if report is None else self.link.layout.mask(list(report.modules))
            number = LOCAL if not mask else self._seats[digest] | mask << _SEAT_BITS
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
        """Return the adapters whose requests a step with these statuses may have affected."""
        if not status.any():
            return frozenset()
        with self._lock:
            names = {n: self._seats.get(r.digest) for n, r in self._reports.items()}
            digests = frozenset(d for d, number in self._seats.items() if status[number])
        name_of = {number: name for name, number in names.items()}
        failed = {name_of.get(n, str(n)): Status(int(s)).name for n, s in enumerate(status) if s}
        logger.warning(
            "A step failed at %s.", ", ".join(f"tenant {name} ({s})" for name, s in failed.items())
        )
        return digests

    def take_failures(self) -> list[tuple[str, str]]:
        """Return (digest, why) of adapters whose waiting requests must end."""
        with self._lock:
            seats = [(digest, self._seats.get(digest)) for digest in self._live]
        is_lost = self.link.client.is_lost
        return [(digest, LOST) for digest, seat in seats if seat is None or is_lost(seat)]

    @property
    def is_lost(self) -> bool:
        """True if an adapter with requests is not there."""
        return bool(self.take_failures())

    @property
    def is_busy(self) -> bool:
        """True if `collect` or `take_failures` may have anything to do."""
        return bool(self._dropped or self._left or (self._live and self.take_failures()))

    def close(self) -> None:
        """Let all tenants go."""
        self.link.client.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when anything is kept for nobody."""
        assert not self._live, f"adapters {sorted(self._live)} are kept for nobody"
        seats = list(self._seats.values())
        assert len(seats) == len({*seats}), "two adapters have one seat"

    def _free_seats(self) -> None:
        pending = {digest for _, digest in self._dropped} | self._live.keys()
        for digest in [d for d in self._left if d not in pending]:
            self._left.discard(digest)
            del self._seats[digest]


@dataclasses.dataclass(eq=False)
class TenantAccess:
    """The settings of an engine of tenants; `side` is set when the engine is built."""

    max_tenants: int
    wait_s: float  # bound of one exchange
    side: TenantSide | None = None
    holds_all = True

    def open(self, config: EngineConfig, dtype: str) -> TenantSide:
        """Return the engine's end. Raises ValueError for what tenants do not serve."""
        if not 1 <= self.max_tenants <= MOST_TENANTS:
            raise ValueError(f"max_tenants must be in 1..{MOST_TENANTS}, got {self.max_tenants}.")
        if jax.default_backend() != "cpu":
            raise ValueError(
                f"isolation 'server' runs on CPUs, not on {jax.default_backend()}: use 'process'."
            )
        layout, moe = layout_of(config.model), read_config(Path(config.model)).moe
        rows = config.step_tokens * (1 if moe is None else moe.top_k)
        shapes = layout.shapes(max(rows, config.max_logit_rows), dtype)
        client = TenantClient(shapes, self.max_tenants)
        client.set_limit(self.wait_s)
        self.side = TenantSide(TenantLink(layout, client), config.max_loras)
        return self.side

    def sizes(self, config: EngineConfig) -> dict[str, Any]:
        """Return what a tenant must know of the engine: arguments of tenant_adapter.open_tenant."""
        assert self.side is not None, "sizes before the engine is built"
        shapes = self.side.link.client.shapes
        return {
            "max_rank": config.max_lora_rank,
            "max_rows": shapes.max_rows,
            "dtype": shapes.dtype,
        }

    def read_adapter(self, *given: Any, **more: Any) -> AdapterWeights:
        """Return what the engine may know of an adapter; see TenantSide.read."""
        assert self.side is not None, "an adapter is read before the engine is built"
        return self.side.read(*given, **more)


def report_of(fields: dict[str, Any]) -> AdapterReport:
    """Return the report of `AdapterReport.as_json`, which has come as JSON.

    Raises KeyError and TypeError for other fields.
    """
    modules = {
        name: ModuleReport(**{key: tuple(value) for key, value in module.items()})
        for name, module in fields["modules"].items()
    }
    kind = AdapterKind(fields["kind"])
    changed = {"kind": kind, "modules": modules, "brings": (), "experts": {}}
    changed["warnings"] = tuple(fields["warnings"])
    changed["added_tokens"] = tuple(AddedToken(**token) for token in fields["added_tokens"])
    return AdapterReport(**fields | changed)


def digest_of(name: str, digest: str) -> str:
    """Return the digest under which an engine knows a tenant's adapter.

    It differs for equal files of two tenants, so that these share neither a seat nor KV pages.
    """
    return hashlib.sha256(f"tenant {name} {digest}".encode()).hexdigest()
