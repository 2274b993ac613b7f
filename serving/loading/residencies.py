"""The residencies of an engine: all kinds of adapters behind one `AdapterResidency`.

To scheduler and step an adapter slot is one number: the LoRA slots come first, the ESFT slots
follow, then those of pairs. An entry finds its residency by its kind, a digest by who knows it.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lora_jax.adapters import row_copies
from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.host_copier import HostCopier
from lora_jax.adapters.host_table import HostTable
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.lora_load_job import LoraLoadJob, RowChunk, SlotEntry
from lora_jax.adapters.row_copies import Copier, LoraCopyJob
from lora_jax.adapters.weights import AnyWeights
from serving.loading import page_room
from serving.loading.adapter_loader import AdapterLoader, Changes, ResidencySnapshot
from serving.loading.esft_parts import EsftParts
from serving.loading.esft_residency import EsftResidency
from serving.loading.local_experts import LocalExperts
from serving.loading.lora_residency import HostForm, LoraResidency
from serving.loading.page_room import PageRoom
from serving.loading.pair_residency import PairResidency
from serving.loading.pooled_allocator import PooledSlotAllocator
from serving.loading.pooled_residency import PooledLoraResidency
from serving.loading.residency import AbstractResidency, DeviceTables, Failures
from serving.loading.server_residency import ServerResidency
from serving.loading.stand_in_residency import StandInResidency
from serving.lora_server.instance import InstanceSide
from serving.lora_server.sides import RemoteSide

_COPIED_AT_ONCE = 8  # loads: one waits for two steps, however little it copies

_NO_ESFT = (
    "this server has no room for any: max_esft_adapters is 0, or the log of its start says why "
    'after "ESFT adapters: none"'
)
_NO_ROOM = {
    AdapterKind.LORA: "a LoRA adapter; this server has no slots for any (max_loras).",
    AdapterKind.ESFT: f"an ESFT adapter; {_NO_ESFT}.",
    AdapterKind.PAIR: f"a pair with an ESFT adapter; {_NO_ESFT}.",
}


def _always() -> bool:
    return True


class Residencies:
    """All residencies of an engine, at most one of each kind; threads as one has them."""

    def __init__(self, residencies: Sequence[AbstractResidency] = ()):
        """Without any the engine serves its base model only."""
        self._by_kind = {residency.kind: residency for residency in residencies}
        assert len(self._by_kind) == len(residencies), "two residencies of one kind"
        self._all = tuple(residencies)
        self._on_drop: Callable[[], None] = lambda: None

    def of(self, kind: AdapterKind) -> AbstractResidency | None:
        """Return the residency of a kind; None where the engine serves none of it."""
        return self._by_kind.get(kind)

    # The registry's side.

    def check_fits(self, weights: AnyWeights) -> None:
        """Raise ValueError when the adapter would not fit even on an empty device."""
        self._for(weights).check_fits(weights)

    def keep(self, weights: AnyWeights) -> AnyWeights:
        """Return the form in which the host keeps the weights. Raises ValueError as check_fits."""
        return self._for(weights).keep(weights)

    def keep_composed(self, weights: AnyWeights) -> AnyWeights:
        """Return the form in which the host keeps weights composed of such that it keeps."""
        return self._for(weights).keep_composed(weights)

    def in_use(self) -> frozenset[str]:
        """Return the weights that live requests need; any thread may ask."""
        return frozenset().union(*(residency.in_use() for residency in self._all))

    # The scheduler's side.

    def acquire(self, digest: str) -> int | None:
        """Return the slot and count one more user; None while the adapter is not resident."""
        return self._knowing(digest).acquire(digest)

    def release(self, digest: str) -> None:
        """Count one user less."""
        self._knowing(digest).release(digest)

    def is_loading(self, digest: str) -> bool:
        """Return whether the adapter has a place but is not yet resident."""
        return self._knowing(digest).is_loading(digest)

    def is_resident(self, digest: str) -> bool:
        """Return whether `acquire` would return a slot, as far as that is known."""
        return self._knowing(digest).is_resident(digest)

    def protect(self, digests: frozenset[str]) -> None:
        """Evict none of these for another's sake until the next call."""
        for residency in self._all:
            residency.protect(digests)

    def pool_of(self, digest: str) -> AdapterKind | None:
        """Name the slots that the adapter takes one of; None where nobody may take its place."""
        return self._knowing(digest).pool_of(digest)

    # The engine's side.

    def retain(self, entry: AdapterEntry) -> None:
        """Keep the entry's weights until a request that needs them ends (`drop`)."""
        self._by_kind[entry.kind].retain(entry)

    def drop(self, digest: str) -> None:
        """One request that needed these weights has ended."""
        self._knowing(digest).drop(digest)
        self._on_drop()

    def call_on_drop(self, on_drop: Callable[[], None]) -> None:
        """Have `on_drop` called when a request needs its weights no more; it must not wait."""
        self._on_drop = on_drop

    def follow(self, changes: Changes) -> None:
        """Follow the registry: each name with the adapter that it stands for in memory now."""
        for kind, residency in self._by_kind.items():
            residency.follow(
                [(n, e if e is not None and e.kind == kind else None) for n, e in changes]
            )

    def prepare(self, device: DeviceTables, dispatched: int) -> None:
        """Tell the device what the next step, number `dispatched`, must know."""
        for residency in self._all:
            residency.prepare(device, dispatched)

    def advance(
        self,
        device: DeviceTables,
        max_chunks: int,
        dispatched: int,
        read: int,
        runs: Callable[[], bool] = _always,
    ) -> Failures:
        """Write up to `max_chunks` of each kind's loads and free what no step can read.

        `dispatched` steps were sent to the device so far, the results of `read` have come back.
        `runs` says whether the device is still at work: if not, the next step is due, and each kind
        writes no more than has begun. Returns (digest, why) of loads that have failed for good;
        their requests must end.
        """
        steps = dispatched, read
        for residency in self._all:
            residency.look_at(runs)
        each = [residency.advance(device, max_chunks, *steps) for residency in self._all]
        for residency in self._all:
            residency.look_at(_always)  # a step keeps its results, and the loads the step
        failures = [failure for failures in each for failure in failures]
        return failures + [more for each in self._all for more in each.failed_with(failures)]

    def affected_by(self, status: Any) -> frozenset[str]:
        """Return the adapters whose requests a step with this status may have affected."""
        return frozenset().union(*(residency.affected_by(status) for residency in self._all))

    def servable_here(self, digests: Iterable[str]) -> frozenset[str]:
        """Return those adapters that the device can serve without a LoRA Server now."""
        digests = frozenset(digests)
        return frozenset().union(*(residency.servable_here(digests) for residency in self._all))

    def call_on_news(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when another thread has something for `advance` to do."""
        for residency in self._all:
            residency.call_on_news(wake)

    @property
    def is_busy(self) -> bool:
        """True if `advance` has anything to do."""
        return any(residency.is_busy for residency in self._all)

    @property
    def snapshot(self) -> ResidencySnapshot:
        """Adapters of all kinds on the device; any thread may ask."""
        snapshots = (residency.snapshot for residency in self._all)
        return functools.reduce(operator.add, snapshots, ResidencySnapshot())

    def holds(self, digest: str) -> bool:
        """Return whether an adapter is on the device; any thread may ask."""
        return any(digest in residency.resident for residency in self._all)

    def rest(self) -> None:
        """Give the device back what unloaded adapters have left; for when nothing is to be done."""
        for residency in self._all:
            residency.rest()

    def close(self) -> None:
        """Give the adapters' memory back; nothing may run on the device any more."""
        for residency in reversed(self._all):
            residency.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when the books contradict each other while nothing runs."""
        for residency in self._all:
            residency.check_integrity()

    def _for(self, weights: AnyWeights) -> AbstractResidency:
        residency = self._by_kind.get(weights.report.kind)
        if residency is None:
            raise ValueError(_NO_ROOM[weights.report.kind])
        return residency

    def _knowing(self, digest: str) -> AbstractResidency:
        for residency in self._all:
            if residency.knows(digest):
                return residency
        raise KeyError(f"no residency knows the adapter {digest[:12]}")


def make_residencies(
    allocator: SlotAllocator,
    esft: EsftParts | None,
    server: RemoteSide | None,
    *,
    copier: Copier | None = None,
    host_form: HostForm | None = None,
    on_loaded: Callable[[float], None],
    tell: Callable[[RowChunk | SlotEntry], None] = lambda what: None,
    room: PageRoom | None = None,
    table: HostTable | None = None,
) -> Residencies:
    """Return the residency of each kind that an engine serves; LoRA's slots come first.

    `esft` is the room for ESFT adapters, `server` the way to a LoRA Server, None where there is
    none. With a `copier` the host copies LoRA rows beside the device's programs; `host_form`
    makes of LoRA weights what the host keeps. `on_loaded` is told the seconds of each load,
    `tell` each write of LoRA rows that no copier does, before it is done. With a `room` rank rows
    lie in a pool of pages. With a `table` the host writes that too, where no `server` has a part.
    """
    if room is not None:
        assert isinstance(allocator, PooledSlotAllocator), "a pool has an allocator of its own"
        at_once = 1 if copier is None else _COPIED_AT_ONCE
        chunk = page_room.CHUNK_BYTES if copier is None else row_copies.CHUNK_BYTES
        jobs = room.jobs(allocator, chunk)
        loads = AdapterLoader(allocator, jobs, at_once=at_once, on_loaded=on_loaded)
        pins = None if copier is None else room.pool.memory  # which copies the rows of this engine
        pooled = PooledLoraResidency(loads, room, pins, host_form)
        return _beside_experts(pooled, allocator, esft, on_loaded)
    make_job, at_once = functools.partial(LoraLoadJob, tell=tell), 1
    if copier is not None:
        chunk = copier.chunk_bytes if isinstance(copier, HostCopier) else row_copies.CHUNK_BYTES
        table = table if server is None else None
        make_job = functools.partial(LoraCopyJob, copier=copier, chunk_bytes=chunk, table=table)
        at_once = _COPIED_AT_ONCE
    loader = AdapterLoader(allocator, make_job, at_once=at_once, on_loaded=on_loaded)
    if server is None:
        lora = LoraResidency(loader, copier, host_form, table)
    elif isinstance(server, InstanceSide) and server.num_local:
        lora = StandInResidency(loader, server, LocalExperts(loader), copier, host_form)
    else:
        lora = ServerResidency(loader, server, copier, host_form)
    return _beside_experts(lora, allocator, esft, on_loaded)


def _beside_experts(
    lora: LoraResidency,
    allocator: SlotAllocator,
    esft: EsftParts | None,
    on_loaded: Callable[[float], None],
) -> Residencies:
    """Return the residencies of LoRA adapters and, if there are any, of ESFT ones and pairs."""
    if esft is None:
        return Residencies([lora])
    num_slots = allocator.num_slots
    experts = AdapterLoader(esft.room.allocator, esft.room.job, on_loaded=on_loaded)
    whole = EsftResidency(experts, esft.room, first_slot=num_slots)
    num_all = num_slots + esft.room.allocator.num_slots
    return Residencies([lora, whole, PairResidency(lora, whole, num_slots, num_all)])
