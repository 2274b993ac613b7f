"""Processes of several hosts over TCP: a thread at each end between the socket and local slots.

Both sides prove that they know one secret before anything else is said. What follows is neither
encrypted nor sealed against a third party on the wire: for loopback and private networks.
"""

import functools
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Sequence

from serving.lora_server.transport import handshake
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.compatibility import Terms
from serving.lora_server.transport.handshake import AbstractTransport
from serving.lora_server.transport.library import calls, numbers, shared_memory
from serving.lora_server.transport.shapes import PAGE, Shapes
from serving.lora_server.transport.slots import Joined, SlotClient, SlotServer
from serving.lora_server.transport.socket_messages import Guest, owned, receive, send

SHORTEST_SECRET = 16  # bytes
NO_SECRET = b""
_CLIENT, _SERVER = b"client", b"server"

# What runs beside slots until the connection ends: (shapes, connection, slots, beside the client).
RunRelay = Callable[[Shapes, socket.socket, Joined, bool], None]


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raises OSError if that cannot be."""
    return socket.create_server((host, port))


def open_server(
    listening: socket.socket, terms: Terms, rank: int, secret: bytes, *, pull: bool = False
) -> SlotServer:
    """Return a server that lets in clients with the same secret at a socket that it owns now.

    Raises ValueError for a rank outside the plan and for a short secret.
    """
    with owned(listening):
        transport = Tcp(secret)
    return handshake.open_server(transport, listening, terms, rank, pull=pull)


def open_client(
    addresses: Sequence[tuple[str, int]],
    terms: Terms,
    secret: bytes,
    *,
    patience: float = 10.0,
    pull: bool = False,
) -> SlotClient:
    """Return a client of the servers at (host, port); see handshake.open_client for the errors."""
    return handshake.open_client(Tcp(secret), addresses, terms, patience=patience, pull=pull)


class Tcp(AbstractTransport[SlotServer]):
    """Each side has slots of its own, and a relay carries messages between them."""

    num_fds = 0

    def __init__(self, secret: bytes, relay: RunRelay | None = None):
        """With NO_SECRET every client is accepted. `relay` is another than over the socket."""
        self._relay: RunRelay = _relay if relay is None else relay
        if secret is NO_SECRET:
            return
        if len(secret) < SHORTEST_SECRET:
            raise ValueError(f"a secret needs {SHORTEST_SECRET} bytes or more, got {len(secret)}")
        self.admit_client = functools.partial(_admit_client, secret)
        self.admit_server = functools.partial(_admit_server, secret)

    def welcome(self, server: SlotServer, greeting: dict, last_epoch: int) -> Guest:
        client, joined = server.join(last_epoch)

        def gone() -> None:
            os.close(joined.channel)
            os.close(joined.bell)
            server.leave(client)

        def stay(connection: socket.socket) -> None:
            self._relay(server.shapes, connection, joined, False)

        return Guest({"epoch": joined.epoch}, [], stay, gone)

    def client_slots(self, terms: Terms, fds: list[int]) -> tuple[int, int]:
        channel = shared_memory(terms.shapes.channel_bytes)
        try:
            return channel, shared_memory(PAGE)
        except OSError:
            os.close(channel)
            raise

    def client_stay(self, terms: Terms, joined: Joined) -> Callable[[socket.socket], None]:
        duplicate = Joined(os.dup(joined.channel), os.dup(joined.bell), joined.epoch)

        def stay(connection: socket.socket) -> None:
            try:
                self._relay(terms.shapes, connection, duplicate, True)
            finally:
                os.close(duplicate.channel)
                os.close(duplicate.bell)

        return stay


def _relay(shapes: Shapes, connection: socket.socket, slots: Joined, beside_client: bool) -> None:
    """Carry messages until the connection ends, or something comes that is not a message."""
    relay = calls().relay
    slot_fields = slots.channel, slots.bell, slots.epoch
    relay(numbers(shapes), connection.fileno(), *slot_fields, int(beside_client))


def _admit_client(secret: bytes, connection: socket.socket) -> None:
    """Ask for a proof, then give one. Raises TransportError."""
    theirs, nonce = str(receive(connection)[0].get("nonce")), secrets.token_hex(32)
    send(connection, {"nonce": nonce})
    proof = str(receive(connection)[0].get("proof"))
    if not _equal(proof, _proof(secret, _CLIENT, nonce, theirs)):
        raise TransportError("The secrets differ; start both sides with the same one.")
    send(connection, {"proof": _proof(secret, _SERVER, theirs, nonce)})


def _admit_server(secret: bytes, connection: socket.socket) -> None:
    """Give a proof, then ask for one. Raises TransportError."""
    nonce = secrets.token_hex(32)
    send(connection, {"nonce": nonce})
    theirs = str(receive(connection)[0].get("nonce"))
    send(connection, {"proof": _proof(secret, _CLIENT, theirs, nonce)})
    answer = receive(connection)[0]
    if "refused" in answer:
        raise TransportError(str(answer["refused"]))
    if not _equal(str(answer.get("proof")), _proof(secret, _SERVER, nonce, theirs)):
        raise TransportError("The server does not know the secret; correct the address.")


def _equal(given: str, wanted: str) -> bool:
    """Compare in a time that tells nothing."""
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def _proof(secret: bytes, role: bytes, asked: str, asking: str) -> str:
    """Return the proof of the secret for the other side's nonce `asked`."""
    message = b"|".join([role, asked.encode("utf-8", "replace"), asking.encode("utf-8", "replace")])
    return hmac.new(secret, message, "sha256").hexdigest()
