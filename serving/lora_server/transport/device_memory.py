"""Devices of one host that write into each other's memory: GPUs over NVLink, no host in between.

Which backend's memory and kernels these are is the business of its endpoints (`device_endpoints`).
"""

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from serving.lora_server.transport import handshake
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.client_base import AbstractConnector
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.device_client import (
    AbstractCalledConnector,
    DeviceClient,
    Landed,
)
from serving.lora_server.transport.device_endpoints import Channel, DeviceEndpoints
from serving.lora_server.transport.device_server import DeviceServer
from serving.lora_server.transport.handshake import AbstractTransport
from serving.lora_server.transport.shapes import Shapes
from serving.lora_server.transport.slots import Joined
from serving.lora_server.transport.socket_messages import Guest, unix_listener, wait_for_end


def open_server(
    path: str | Path, terms: Terms, rank: int, endpoints: DeviceEndpoints, *, pull: bool = False
) -> DeviceServer:
    """Return a server on the device of `endpoints` that clients of this user find at a Unix socket.

    Raises ValueError for a rank outside the plan, and if another process listens there.
    """

    def make() -> DeviceServer:
        return DeviceServer(terms.shapes, endpoints, pull=pull)

    return handshake.let_in(_DeviceMemory(endpoints), unix_listener(path), terms, rank, make)


def open_client(
    paths: Sequence[str | Path],
    terms: Terms,
    endpoints: DeviceEndpoints,
    *,
    patience: float = 10.0,
    pull: bool = False,
    separate_stream: bool = True,
    late: bool = False,
) -> DeviceClient:
    """Return a client on the device of `endpoints`; see handshake.open_client for the errors.

    `pull` must be the servers' own; for `separate_stream` see DeviceClient.
    """
    memory, waits_s = _DeviceMemory(endpoints), None if late else patience
    callers = handshake.callers(memory, paths, terms, waits_s)
    connectors = [_Imported(caller, terms.shapes, endpoints, pull) for caller in callers]
    options = {"separate_stream": separate_stream, "late": late}
    return DeviceClient(terms.shapes, connectors, endpoints, **options)


def open_local_client(
    servers: Sequence[DeviceServer], endpoints: DeviceEndpoints, *, separate_stream: bool = True
) -> DeviceClient:
    """Return a client, on another device or the same, of servers in this process.

    Raises ValueError unless their shapes are equal.
    """
    shapes = {server.shapes for server in servers}
    if len(shapes) != 1:
        raise ValueError(f"a client needs servers of one shape, got {len(shapes)} shapes")
    connectors = [_Local(server, endpoints) for server in servers]
    return DeviceClient(shapes.pop(), connectors, endpoints, separate_stream=separate_stream)


class _Local(AbstractConnector):
    """Joins a server of this process by a call; a closed server is noticed by a wait."""

    def __init__(self, server: DeviceServer, endpoints: DeviceEndpoints):
        self._server, self._endpoints, self._client = server, endpoints, 0

    def join(self, last_epoch: int) -> Landed:
        self._client, channel, fds, epoch = self._server.join(
            last_epoch, self._endpoints.identity, local=True
        )
        _close(fds)
        return Landed(channel, epoch)

    def watch(self, landed: Landed, lost: Callable[[], None]) -> None:
        pass

    def leave(self) -> None:
        self._server.leave(self._client)


class _Imported(AbstractCalledConnector):
    """Maps what a server of another process sends."""

    def __init__(
        self, caller: AbstractConnector, shapes: Shapes, endpoints: DeviceEndpoints, pull: bool
    ):
        super().__init__(caller, shapes)
        self._endpoints, self._pull = endpoints, pull

    def channel_of(self, joined: Joined, request_bytes: int, response_bytes: int) -> Channel:
        fds = [joined.channel, joined.bell]
        try:
            return self._endpoints.import_channel(
                fds, request_bytes, response_bytes, pull=self._pull
            )
        except (ValueError, MemoryError) as error:
            raise TransportError(f"the server's memory cannot be mapped: {error}") from error
        finally:
            _close(fds)


class AbstractDeviceTransport(AbstractTransport[DeviceServer]):
    """Set-up between devices: the server has the slots; a closed connection means a lost peer."""

    def welcome(self, server: DeviceServer, greeting: dict, last_epoch: int) -> Guest:
        client, channel, fds, epoch = server.join(
            last_epoch, str(greeting.get("device")), local=False
        )
        del channel  # the server's own, or the world's
        return Guest({"epoch": epoch}, fds, wait_for_end, lambda: server.leave(client))

    def client_stay(self, terms: Terms, joined: Joined) -> Callable[[socket.socket], None]:
        return wait_for_end


class _DeviceMemory(AbstractDeviceTransport):
    """The server makes both slots, each in the memory of its receiver's device."""

    num_fds = 2

    def __init__(self, endpoints: DeviceEndpoints):
        self._endpoints = endpoints

    def greeting(self) -> dict[str, object]:
        return {"device": self._endpoints.identity}

    def client_slots(self, terms: Terms, fds: list[int]) -> tuple[int, int]:
        return fds[0], fds[1]


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
