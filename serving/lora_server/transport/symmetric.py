"""Devices of one world whose memory is symmetric (NVSHMEM): also GPUs of several hosts.

All slots are there when the world begins; the handshake only compares terms, and its connection
says when the other side has gone. A process that has ended does not come back into the same world:
`rejoin` goes on failing, until whoever started the processes begins another world with new ones.
"""

import socket
from collections.abc import Sequence
from typing import Protocol

from serving.lora_server.transport import handshake
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.client_base import AbstractConnector
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.device_client import AbstractCalledConnector, DeviceClient
from serving.lora_server.transport.device_endpoints import Channel, DeviceEndpoints
from serving.lora_server.transport.device_memory import AbstractDeviceTransport
from serving.lora_server.transport.device_server import DeviceServer
from serving.lora_server.transport.hosts.tcp import NO_SECRET, Tcp
from serving.lora_server.transport.shapes import Shapes
from serving.lora_server.transport.slots import Joined
from serving.lora_server.transport.socket_messages import Address, owned

_NO_DESCRIPTOR = -1


class SymmetricEndpoints(DeviceEndpoints, Protocol):
    """A device that reaches others by their numbers in its world."""

    def next_turn(self) -> str:
        """Return what to say of it to the next server that is joined."""
        ...

    def channel_to(self, server: int, request_bytes: int, response_bytes: int) -> Channel:
        """Return the channel to the server that was joined. Raises ValueError for another world."""
        ...


def open_server(
    listening: socket.socket,
    terms: Terms,
    rank: int,
    endpoints: SymmetricEndpoints,
    secret: bytes | None = None,
) -> DeviceServer:
    """Return a server that lets clients of its world in at a socket that it owns now.

    `secret` as tcp.open_server has it; None for a Unix socket, which only this user may open.
    """
    with owned(listening):
        transport = _Symmetric(endpoints, secret)

    def make() -> DeviceServer:
        return DeviceServer(terms.shapes, endpoints, pull=False)

    return handshake.let_in(transport, listening, terms, rank, make)


def open_client(
    addresses: Sequence[Address],
    terms: Terms,
    endpoints: SymmetricEndpoints,
    servers: Sequence[int],
    secret: bytes | None = None,
    *,
    patience: float = 10.0,
) -> DeviceClient:
    """Return a client of the servers at `addresses`, which have these numbers in the world."""
    callers = handshake.callers(_Symmetric(endpoints, secret), addresses, terms, patience)
    connectors = [
        _Numbered(caller, terms.shapes, endpoints, server)
        for caller, server in zip(callers, servers, strict=True)
    ]
    return DeviceClient(terms.shapes, connectors, endpoints, separate_stream=False)


class _Numbered(AbstractCalledConnector):
    """Finds a server's slots by its number."""

    def __init__(
        self, caller: AbstractConnector, shapes: Shapes, endpoints: SymmetricEndpoints, server: int
    ):
        super().__init__(caller, shapes)
        self._endpoints, self._server = endpoints, server

    def channel_of(self, joined: Joined, request_bytes: int, response_bytes: int) -> Channel:
        try:
            return self._endpoints.channel_to(self._server, request_bytes, response_bytes)
        except ValueError as error:
            raise TransportError(str(error)) from error


class _Symmetric(AbstractDeviceTransport):
    """Nothing is sent but numbers."""

    num_fds = 0

    def __init__(self, endpoints: SymmetricEndpoints, secret: bytes | None):
        self._endpoints = endpoints
        proof = Tcp(NO_SECRET if secret is None else secret)
        self.admit_client, self.admit_server = proof.admit_client, proof.admit_server

    def greeting(self) -> dict[str, object]:
        return {"device": self._endpoints.next_turn()}

    def client_slots(self, terms: Terms, fds: list[int]) -> tuple[int, int]:
        return _NO_DESCRIPTOR, _NO_DESCRIPTOR
