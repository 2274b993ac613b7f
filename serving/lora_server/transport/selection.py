"""Choice of the transport between an instance and a LoRA Server, of one host or of several.

On one host by default ("auto") the one of the device's memory; "nixl" where it is to be as between
hosts. "tcp" and "nixl" have their slots in host memory: between hosts they join CPUs, and GPUs need
"nvshmem", whose members begin as one world.
"""

import dataclasses
import socket
from collections.abc import Sequence
from pathlib import Path

import jax

from serving.lora_server.transport import (
    device_endpoints,
    device_memory,
    shared_memory,
    symmetric,
    world_library,
)
from serving.lora_server.transport.base import AbstractClient, AbstractServer
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.hosts import nixl, tcp
from serving.lora_server.transport.socket_messages import Address, owned, unix_listener
from serving.lora_server.transport.world import World

AUTO, TCP, NIXL, NVSHMEM = TRANSPORTS = ("auto", "tcp", "nixl", "nvshmem")


@dataclasses.dataclass(frozen=True)
class RankPlace:
    """Address at which a rank accepts instances: a Unix socket, or a host and port (0: a free one).

    Over TCP both sides must know the secret.
    """

    address: str | tuple[str, int]
    secret: bytes = dataclasses.field(default=b"", repr=False)


class Door:
    """Opens a rank's server at its place; `port` is then where it listens, 0 of a Unix socket."""

    def __init__(self, terms: Terms, rank: int, transport: str, place: RankPlace):
        self._terms, self._rank, self._transport, self._place = terms, rank, transport, place
        self.port = 0
        self.world: World | None = None  # of the transport nvshmem, before `open`
        self._listening: socket.socket | None = None

    def listen(self) -> None:
        """Have a port, or a Unix socket, before the server is opened. Raises OSError.

        Members of a world are told the addresses before they join, and `open` waits for them.
        """
        address = self._place.address
        if isinstance(address, tuple):
            self._listening = tcp.listen(*address)
            self.port = self._listening.getsockname()[1]
        else:
            self._listening = unix_listener(address)

    def open(self) -> AbstractServer:
        """Return the server; see open_server for the errors. Raises OSError for a taken port.

        In a world it waits until all members have joined; see world_library.join for the errors.
        """
        terms, rank, address = self._terms, self._rank, self._place.address
        if self.world is not None:
            assert self._listening is not None, "members of a world do not know the address"
            with owned(self._listening):
                endpoints = world_library.join(self.world, rank, terms.shapes)
            secret = self._place.secret if isinstance(address, tuple) else None
            return symmetric.open_server(self._listening, terms, rank, endpoints, secret)
        _require_no_world(self._transport)
        if not isinstance(address, tuple):
            return open_server(address, terms, rank, self._transport)
        far = nixl.open_far_server if self._transport == NIXL else tcp.open_server
        _require_host_memory(self._transport)
        listening = tcp.listen(*address)
        self.port = listening.getsockname()[1]
        return far(listening, terms, rank, self._place.secret)


def open_server(path: Address, terms: Terms, rank: int, transport: str = AUTO) -> AbstractServer:
    """Return a server that clients of this user and host find at the Unix socket `path`.

    On a CPU its slots are shared memory, else they are in the memory of the devices. Raises
    ValueError as shared_memory.open_server does, and NotImplementedError where the device has no
    such transport, or where it has not the one that is asked for.
    """
    assert not isinstance(path, tuple), "a port of a host is opened by its Door"
    if transport == NIXL:
        _require_host_memory(NIXL)
        return nixl.open_server(path, terms, rank)
    if jax.default_backend() == "cpu":
        return shared_memory.open_server(path, terms, rank)
    return device_memory.open_server(path, terms, rank, _endpoints())


def open_client_at(
    places: Sequence[RankPlace],
    terms: Terms,
    transport: str = AUTO,
    *,
    separate_stream: bool = True,
    device: int = 0,
    world: tuple[World, int] | None = None,
) -> AbstractClient:
    """Return a client of the servers at the places, all of which are of one kind.

    It is that of one `device`; see `open_client`. The transport nvshmem needs the `world` and this
    process's PE, and waits until all members have joined; see world_library.join for the errors.
    """
    if world is not None:
        return _open_in_world(places, terms, *world)
    _require_no_world(transport)
    far = [place.address for place in places if isinstance(place.address, tuple)]
    if not far:
        paths = [str(place.address) for place in places]
        options = {"separate_stream": separate_stream, "device": device}
        return open_client(paths, terms, transport, **options)
    _require_host_memory(transport)
    open_far = nixl.open_far_client if transport == NIXL else tcp.open_client
    return open_far(far, terms, places[0].secret)


def _open_in_world(
    places: Sequence[RankPlace], terms: Terms, world: World, pe: int
) -> AbstractClient:
    endpoints = world_library.join(world, pe, terms.shapes)
    addresses = [place.address for place in places]
    secret = places[0].secret if isinstance(addresses[0], tuple) else None
    return symmetric.open_client(addresses, terms, endpoints, range(world.ranks), secret)


def open_client(
    paths: Sequence[str | Path],
    terms: Terms,
    transport: str = AUTO,
    *,
    separate_stream: bool = True,
    device: int = 0,
    late: bool = False,
) -> AbstractClient:
    """Return a client of the servers at `paths`; see handshake.open_client for the errors.

    It is that of one `device` of this process, by its number. For `separate_stream`, which is for
    devices' memory, see DeviceClient.
    """
    if transport == NIXL:
        _require_host_memory(NIXL)
        return nixl.open_client(paths, terms)
    if jax.default_backend() == "cpu":
        return shared_memory.open_client(paths, terms, late=late)
    options = {"separate_stream": separate_stream, "late": late}
    return device_memory.open_client(paths, terms, _endpoints(device), **options)


def _require_no_world(transport: str) -> None:
    if transport == NVSHMEM:
        raise NotImplementedError(
            "The transport nvshmem joins the processes of one world, which the command begins: "
            "start instances and LoRA Server by one `python -m serving.launch`."
        )


def _require_host_memory(transport: str) -> None:
    if jax.default_backend() != "cpu":
        raise NotImplementedError(
            f"The transport {transport} has its slots in host memory: a program on "
            f"{jax.default_backend()} needs --lora-server-transport auto, on one host, or "
            "nvshmem."
        )


def _endpoints(number: int = 0) -> device_endpoints.DeviceEndpoints:
    """Return the endpoints of a device that this process computes on."""
    device = jax.local_devices()[number]
    return device_endpoints.for_platform(device.platform, device.local_hardware_id or 0)
