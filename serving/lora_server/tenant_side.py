"""An engine whose adapters are all in tenants' processes: `isolation=server` of functions.

To the layers a tenant is a LoRA Server that holds one whole adapter. A tenant that ends, or does
not answer in time, ends its own requests; others lose nothing but that wait, once.
"""

import dataclasses
import hashlib
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lora_jax.adapters.added_tokens import AddedToken
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, ModuleReport
from lora_jax.models.loader import read_config
from lora_jax.sharding import Split
from lora_jax.typing import Array, Int
from serving.api.config import EngineConfig
from serving.lora_server.client import LOCAL, AbstractStep, RemoteTable
from serving.lora_server.tenant_adapter import layout_of
from serving.lora_server.tenant_layout import TenantLayout
from serving.lora_server.transport.base import PushRows, Status
from serving.lora_server.transport.tenants import Seat, TenantClient
from serving.lora_server.whole_side import AbstractWholeSide, numbers_at

logger = logging.getLogger(__name__)

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


class TenantStep(AbstractStep[TenantLayout]):
    """One step's way to tenants: each row goes to its own, if that has the site."""

    def _destination(
        self,
        modules: tuple[str, ...],
        layer: int,
        numbers: Int[Array, "rows"],
        row_to_expert: Int[Array, "rows"],
        num_rows: Int[Array, ""],
    ) -> tuple[int, int, PushRows]:
        site = self._layout.site(modules)
        seat = numbers_at(site, numbers, _SEAT_BITS)
        rows = PushRows(num_rows, self._table.version, seat, seat, row_to_expert)
        return site, layer, rows


class TenantSide(AbstractWholeSide):
    """One engine's end of its tenants; `sit` and `leave` are for any thread."""

    def __init__(self, link: TenantLink, num_slots: int):
        super().__init__(num_slots)
        self.link = link
        self._seats: dict[str, int] = {}  # by digest; one that has left keeps it until unused
        self._reports: dict[str, AdapterReport] = {}  # by name of the adapter
        self._epochs: dict[str, int] = {}  # of its process, by the same
        self._left: set[str] = set()

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

    # What AbstractWholeSide asks for.

    def is_ready(self, digest: str) -> bool:
        """True if the adapter's process is there."""
        with self._lock:
            number = self._seats.get(digest)
        return number is not None and not self.link.client.is_lost(number)

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
        self._tell_lost(failed)
        return digests

    def close(self) -> None:
        """Let all tenants go."""
        self.link.client.close()

    @property
    def _given_numbers(self) -> list[int]:
        return list(self._seats.values())

    def _report(self, name: str) -> AdapterReport | None:
        with self._lock:
            return self._reports.get(name)

    def _number_of(self, digest: str) -> int:
        with self._lock:
            report = next((r for r in self._reports.values() if r.digest == digest), None)
            mask = 0 if report is None else self.link.layout.mask(list(report.modules))
            return self._seats[digest] | mask << _SEAT_BITS if mask else LOCAL

    def _free(self) -> None:
        with self._lock:
            self._free_seats()

    @property
    def _any_leaving(self) -> bool:
        return bool(self._left)

    def _free_seats(self) -> None:
        pending = self._in_use()
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
