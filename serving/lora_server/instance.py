"""Instance side of a LoRA Server: connection, leases and failure handling.

The engine's thread uses it. A wait that fails harms the adapter rows of its step only; those
requests end with an error that says they may be tried again, and a thread tries to reach the lost
ranks anew while base requests go on.
"""

import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from lora_jax.adapters.registry import AdapterEntry
from lora_jax.adapters.weights import AdapterWeights
from serving.api.config import EngineConfig
from serving.lora_server.client import LOCAL, ServerLink
from serving.lora_server.coordinator import LeaseSource
from serving.lora_server.leases import Leases
from serving.lora_server.shards import local_part, split
from serving.lora_server.spec import ServerSpec, design
from serving.lora_server.transport.base import AbstractClient, Status
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.split_client import SplitClient

logger = logging.getLogger(__name__)

LOST = "The LoRA Server is not there now; the request may be tried again."
_REJOIN_S = 0.1  # between two looks for lost ranks


@dataclasses.dataclass(frozen=True, eq=False)
class ServerAccess:
    """Access of one instance to a LoRA Server; `connect` returns a transport to all ranks."""

    spec: ServerSpec
    instance: str
    leases: LeaseSource
    connect: Callable[[Terms, int], AbstractClient]  # of a device, by its number
    wait_s: float = 0.5  # bound of one exchange
    local_slots: int = 0  # adapters whose experts the instance can take over when it is lost
    overlap: bool = True  # exchanges behind the base's computation
    prefetch: bool = True  # an adapter is asked for when its request is queued
    holds_all = False  # of an adapter: attention, router and head may stay on the instance
    read_adapter = None  # adapters are read from their files

    def open(self, config: EngineConfig, dtype: str) -> "InstanceSide":
        """Return an engine's end of the server; see `connect`."""
        return connect(self, config, dtype)


class InstanceSide:
    """One engine's end of a LoRA Server; the engine's thread uses it, `retain` any thread."""

    def __init__(
        self,
        link: ServerLink,
        leases: LeaseSource,
        instance: str,
        num_slots: int,
        num_local: int = 0,
        *,
        prefetch: bool = True,
    ):
        """`instance` is a name of its own, `num_slots` are the engine's own LoRA slots.

        Of these `num_local` are for adapters with their experts. For `prefetch` see Leases.
        """
        self.link, self.num_local = link, num_local
        self.wake: Callable[[], None] = lambda: None  # called when there is news
        self._leases = Leases(leases, instance, lambda: self.wake(), prefetch=prefetch)
        self._numbers = np.full(num_slots, LOCAL, np.int32)
        self._version = 0
        self._changed = False
        self._dropped: list[tuple[int, str]] = []  # (steps sent by then, digest)
        self._remote: dict[str, int] = {}  # live requests by digest of adapters with experts
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._rejoin, name="lora-server-rejoin", daemon=True)
        self._thread.start()

    # Adapters come and go.

    def retain(self, entry: AdapterEntry) -> None:
        """A request that needs the LoRA adapter is queued: lease it, so that it loads meanwhile."""
        if self.link.layout.has_any(entry.report):
            with self._lock:
                self._remote[entry.digest] = self._remote.get(entry.digest, 0) + 1
            self._leases.retain(entry.digest, entry.folder)

    def drop(self, digest: str, dispatched: int) -> None:
        """Such a request has ended; `dispatched` steps were sent, which may have rows of it."""
        with self._lock:
            if digest not in self._remote:
                return
            self._remote[digest] -= 1
            if not self._remote[digest]:
                del self._remote[digest]
        self._dropped.append((dispatched, digest))

    def collect(self, read: int) -> None:
        """Give back what was dropped before the steps whose results have been read."""
        while self._dropped and self._dropped[0][0] <= read:
            self._leases.drop(self._dropped.pop(0)[1])

    def is_ready(self, digest: str) -> bool:
        """True if rows of the adapter may be sent, as far as the server matters."""
        with self._lock:
            remote = digest in self._remote
        return not remote or self._leases.get(digest) is not None

    def keep(self, weights: AdapterWeights) -> AdapterWeights:
        """Return what of an adapter stays here: what the server does not hold, or that and all."""
        return (split if self.num_local else local_part)(weights, self.link.layout)

    def bind(self, slot: int, digest: str) -> None:
        """The adapter, which is ready, is in this slot of the engine's own."""
        lease = self._leases.get(digest)
        number, version = (LOCAL, 0) if lease is None else (lease.number, lease.version)
        if self._numbers[slot] != number or version > self._version:
            self._numbers[slot] = number
            self._version = max(self._version, version)
            self._changed = True

    def bind_local(self, slot: int) -> None:
        """The adapter in this slot has its experts there too: nothing of it is sent."""
        self._changed |= self._numbers[slot] != LOCAL
        self._numbers[slot] = LOCAL

    def take_table(self) -> tuple[np.ndarray, int] | None:
        """Return (number of each slot, version) if that has changed since the last call."""
        if not self._changed:
            return None
        self._changed = False
        return self._numbers.copy(), self._version

    # Failures.

    def affected_by(self, status: np.ndarray) -> frozenset[str]:
        """Return the adapters whose requests a step with these statuses may have affected."""
        if not status.any():
            return frozenset()
        logger.warning(
            "A step failed at the LoRA Server: %s.",
            ", ".join(f"rank {r} {Status(int(s)).name}" for r, s in enumerate(status) if s),
        )
        if (status == Status.REFUSED).any():
            self._leases.renew()
        return self._digests()

    def take_failures(self) -> list[tuple[str, str]]:
        """Return (digest, why) of adapters whose waiting requests must end."""
        if self.link.client.lost():
            return [(digest, LOST) for digest in self._digests()]
        return self._leases.take_errors()

    @property
    def is_lost(self) -> bool:
        """True if a rank of the server is not there."""
        return bool(self.link.client.lost())

    @property
    def is_busy(self) -> bool:
        """True if `collect` or `take_failures` may have anything to do."""
        lost = bool(self._remote and self.link.client.lost())
        return bool(self._dropped) or lost or self._leases.has_errors

    def close(self) -> None:
        """Give all leases back and leave the server."""
        self._closing.set()
        self._thread.join()
        self._leases.close()
        self.link.client.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when anything is kept for nobody."""
        assert not self._remote, f"adapters {sorted(self._remote)} are kept for nobody"
        assert not self._dropped, f"{len(self._dropped)} leases are not given back"

    def _digests(self) -> frozenset[str]:
        with self._lock:
            return frozenset(self._remote)

    def _rejoin(self) -> None:
        client = self.link.client
        while not self._closing.wait(_REJOIN_S):
            if client.lost() and not client.rejoin():
                logger.info("All ranks of the LoRA Server are connected again.")


def check_devices(access: Any, config: EngineConfig) -> None:
    """Raise ValueError for what a LoRA Server beside a model on several devices cannot hold.

    Where adapters are in tenants' processes there is one device.
    """
    if access is None or config.tensor_parallel_size == 1:
        return
    if not isinstance(access, ServerAccess):
        raise ValueError(
            "isolation 'server' is for one device: set tensor_parallel_size to 1, not "
            f"{config.tensor_parallel_size}."
        )
    refused = {
        "enable_expert_parallel False (a device then has parts of experts)": (
            config.enable_expert_parallel is False
        ),
        "lora_attention remote (a device has a part of the heads)": access.spec.attention,
        "local_expert_slots": access.local_slots > 0,
    }
    if wrong := [name for name, given in refused.items() if given]:
        raise ValueError(
            f"A LoRA Server beside instances of {config.tensor_parallel_size} devices does not go "
            f"with {' and '.join(wrong)}: leave that out, or set tensor_parallel_size to 1."
        )


def _client(access: ServerAccess, terms: Terms, devices: int) -> AbstractClient:
    """Return the client of one device, or those of several as one."""
    if devices == 1:
        return access.connect(terms, 0)
    clients: list[AbstractClient] = []
    try:
        for device in range(devices):
            clients.append(access.connect(terms, device))
    except BaseException:
        for client in clients:
            client.close()
        raise
    return SplitClient(clients)


def connect(access: ServerAccess, config: EngineConfig, dtype: str) -> InstanceSide:
    """Return an engine's end of the server, connected.

    Raises ValueError for sizes that do not fit the server, and TransportError (a ConnectionError)
    when it cannot be reached, or serves another base model or in another way.
    """
    here = {"model": config.model, "dtype": dtype, "lora_dtype": config.lora_dtype}
    server_design = design(dataclasses.replace(access.spec, **here))
    server_design.require_rows(config.step_tokens)
    server_design.require_rank(config.max_lora_rank)
    client = _client(access, server_design.terms, config.tensor_parallel_size)
    client.set_limit(access.wait_s)
    local = access.local_slots
    link = ServerLink(server_design.layout, client, has_local=local > 0, overlap=access.overlap)
    slots = config.max_loras + local
    return InstanceSide(
        link, access.leases, access.instance, slots, local, prefetch=access.prefetch
    )
