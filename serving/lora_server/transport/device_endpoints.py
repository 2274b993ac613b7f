"""Interface of a backend's transport in device memory, found by its entry point.

The backend owns channels, kernels and custom calls; device_memory makes a client and a server of
them.
"""

import ctypes
import importlib.metadata
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from lora_jax.typing import Array, Int

GROUP = "lora_jax.transport"  # entry points: a function of the device's number
BACKENDS = {"gpu": "cuda", "cuda": "cuda"}  # entry points' names by platform


class Channel(Protocol):
    """Slots and counters of one client and one server, mapped in this process."""

    request_slot: int  # addresses, of headers
    response_slot: int

    def share(self) -> "Channel":
        """Return it, to be closed once more."""
        ...

    def close(self) -> None:
        """Unmap it with the last holder; no kernel may be able to touch it then."""
        ...


class ClientEndpoint(Protocol):
    """A client on its device. The host's calls come from any thread."""

    def push(
        self,
        x: Array,
        layer: Array,
        rows: Sequence[Array],
        site: int,
        *,
        separate_stream: bool,
        lasting: bool = True,
    ) -> Array:
        """Traced. See AbstractClient.push; `rows` are the fields of PushRows.

        `lasting`: the layer is there until wait_add, so that a push from a separate stream may
        read it late.
        """
        ...

    def wait_add(
        self,
        ys: Sequence[Array],
        keep: Array,
        rows: Sequence[Array],
        servers: int,
        site: int,
        *,
        separate_stream: bool,
    ) -> tuple[tuple[Array, ...], Array]:
        """Traced. See AbstractClient.wait_add."""
        ...

    def grouped(self, ends: Sequence[Any]) -> "ClientEndpoint":
        """Return what programs over devices trace; `ends`, of this backend, are by device."""
        ...

    def attach(self, server: int, channel: Any, epoch: int) -> None:
        """Push to this server from now on; the channel, of this backend, belongs to this end."""
        ...

    def detach(self, peer: int) -> None:
        """Push to this server no more."""
        ...

    def end(self, server: int, epoch: int) -> None:
        """The server of this epoch has gone: a wait for it ends at once."""
        ...

    def ended(self, server: int, epoch: int) -> bool:
        """True if the server of this epoch has gone, or was lost by a wait."""
        ...

    def limit(self, nanos: int) -> None:
        """Bound every later wait."""
        ...

    def stop(self, on: bool) -> None:
        """End waits under way and those to come, until stop(False)."""
        ...

    def counts(self) -> list[int]:
        """Return counts in the order of csrc/client.h."""
        ...

    def close(self) -> None:
        """Push nothing any more, and unmap everything."""
        ...


class ServerEndpoint(Protocol):
    """A server's rank on its device; one thread takes and answers messages, by the host or not."""

    most_peers: int

    def attach(self, client: int, channel: Any, epoch: int) -> int:
        """Take this client's messages; return what `respond` knows it by."""
        ...

    def detach(self, peer: int) -> None:
        """Take this client's messages no more."""
        ...

    def receive(self, nanos: int) -> tuple[int, ...] | None:
        """Return (client, site, layer, rows, table version) of the next message, or None."""
        ...

    def fetch(self, address: int, array: np.ndarray) -> None:
        """Fill an array from a slot."""
        ...

    def respond(self, link: int, site: int, deltas: Sequence[np.ndarray] | None) -> None:
        """Push results to the client of a link; None refuses."""
        ...

    def take(
        self,
        after: Int[Array, "messages 8"],
        limit_us: Int[Array, ""],
        site: int,
        shape: jax.ShapeDtypeStruct,
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Traced: (info, adapters, experts, row_to_message, rows) of a site's next messages."""
        ...

    def judge(
        self,
        before: Int[Array, "messages 8"],
        arrived: Sequence[Array],
        table: Sequence[Array],
        *,
        first_expert: int,
        num_experts: int,
        slots_per_layer: int,
    ) -> tuple[Array, Array, Array]:
        """Traced: (info, row_to_slot, verdicts) of what `take` gave; see DeviceServer.judge."""
        ...

    def answer(
        self,
        info: Int[Array, "messages 8"],
        verdicts: Int[Array, "messages"],
        deltas: Sequence[Array],
        site: int,
    ) -> Int[Array, "messages 8"]:
        """Traced: push results to the clients of the messages, if they are of this site."""
        ...

    def stop(self, on: bool) -> None:
        """Let nothing be received until stop(False)."""
        ...

    def counts(self) -> list[int]:
        """Return counts in the order of csrc/client.h."""
        ...

    def close(self) -> None:
        """Stop, and unmap everything."""
        ...


class DeviceEndpoints(Protocol):
    """One device as an endpoint of transports."""

    @property
    def identity(self) -> str:
        """Return a name of the device that is the same in every process."""
        ...

    def create_channel(
        self, client: str, request_bytes: int, response_bytes: int, *, pull: bool, local: bool
    ) -> tuple[Channel, list[int]]:
        """Return a channel to a client's device, and two descriptors, the caller's to close.

        Raises ValueError where that device cannot be reached.
        """
        ...

    def import_channel(
        self, fds: Sequence[int], request_bytes: int, response_bytes: int, *, pull: bool
    ) -> Channel:
        """Return the channel of a server elsewhere. Raises ValueError for other sizes."""
        ...

    def new_client(self, numbers: ctypes.Array, servers: int) -> ClientEndpoint:
        """Return an endpoint without servers. Raises ValueError for more than the kernels take."""
        ...

    def new_server(self, numbers: ctypes.Array) -> ServerEndpoint:
        """Return an endpoint without clients; errors as new_client."""
        ...


def for_platform(platform: str, device: int = 0) -> DeviceEndpoints:
    """Return an endpoint on one device of a platform, which has jax.default_backend()'s name.

    A backend's code is imported only here, so only where its platform is asked for.

    Raises:
        NotImplementedError: no transport is known or installed for the platform, or it cannot run.
    """
    name = BACKENDS.get(platform)
    for entry in importlib.metadata.entry_points(group=GROUP, name=name) if name else ():
        return entry.load()(device)
    raise NotImplementedError(
        f"no transport in device memory for platform {platform!r} is installed"
    )
