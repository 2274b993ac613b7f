"""LoRA adapters of a LoRA Server that the instance serves itself while the server is lost."""

from collections.abc import Iterable

from lora_jax.adapters.entries import AdapterEntry
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.row_copies import Copier
from serving.loading.adapter_loader import AdapterLoader
from serving.loading.local_experts import LocalExperts
from serving.loading.lora_residency import HostForm
from serving.loading.residency import DeviceTables, Failures
from serving.loading.server_residency import ServerResidency
from serving.lora_server.instance import InstanceSide


class StandInResidency(ServerResidency):
    """As ServerResidency; some own slots have room for whole adapters, which stand in."""

    def __init__(
        self,
        loader: AdapterLoader,
        server: InstanceSide,
        local: LocalExperts,
        copier: Copier | None = None,
        host_form: HostForm | None = None,
    ):
        """`local` brings whole adapters into slots of the same `loader`."""
        super().__init__(loader, server, copier, host_form)
        self._local, self._server = local, server

    def acquire(self, digest: str) -> int | None:
        if not self._stands_in(digest):
            return super().acquire(digest)
        # Sequences of one adapter are in one slot: others are about to leave theirs.
        slot = None if self._loader.users(digest) else self._local.acquire(digest)
        if slot is not None:
            self._server.bind_local(slot)
        return slot

    def release(self, digest: str) -> None:
        if self._local.users(digest):
            self._local.release(digest)
        else:
            super().release(digest)

    def is_loading(self, digest: str) -> bool:
        if self._stands_in(digest):
            return self._local.is_loading(digest)
        return super().is_loading(digest)

    def pool_of(self, digest: str) -> AdapterKind | None:
        return None if self._stands_in(digest) else super().pool_of(digest)

    def retain(self, entry: AdapterEntry) -> None:
        super().retain(entry)
        self._local.retain(entry)

    def drop(self, digest: str) -> None:
        super().drop(digest)
        self._local.drop(digest)

    def advance(
        self, device: DeviceTables, max_chunks: int, dispatched: int, read: int
    ) -> Failures:
        """As ServerResidency; a failure that the instance can stand in for ends no request."""
        failures = super().advance(device, max_chunks, dispatched, read)
        servable = self.servable_here(digest for digest, _ in failures)
        if not self.server.is_lost:
            for digest in servable:
                self._local.serve_instead(digest)
            self._local.collect()
        return [(digest, why) for digest, why in failures if digest not in servable]

    def servable_here(self, digests: Iterable[str]) -> frozenset[str]:
        return frozenset(digest for digest in digests if self._local.can_serve(digest))

    @property
    def is_busy(self) -> bool:
        return (self._local.is_busy and not self.server.is_lost) or super().is_busy

    def check_integrity(self) -> None:
        super().check_integrity()
        self._local.check_integrity()

    def _stands_in(self, digest: str) -> bool:
        """True if this device serves the adapter's experts, and the server does not."""
        is_local = self._local.knows(digest)
        return is_local and (self.server.is_lost or self._local.stands_in(digest))
