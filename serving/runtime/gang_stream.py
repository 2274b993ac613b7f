"""Connections between the processes of an instance over hosts: proofs, commands, beats. No jax.

Rank 0 listens, every other rank connects. Both sides prove that they know the secret before either
takes anything from the other; then rank 0 compares what must be equal everywhere, and says where
jax's coordinator is. Commands are pickled: whoever knows the secret may run code.
"""

import contextlib
import dataclasses
import errno
import hashlib
import hmac
import ipaddress
import json
import logging
import math
import os
import pickle
import secrets
import select
import socket
import struct
import time
from collections.abc import Container, Mapping
from typing import Any

from serving.runtime.about import difference

logger = logging.getLogger(__name__)

MIN_SECRET = 16  # bytes
SILENT_S = 4.0  # three heartbeats missed, and a little
STARTING_S = 60.0  # while a member loads and compiles
BEAT_S = 1.0
_HELLO_S = 5.0  # for each message of a proof
_RETRY_S = 0.2
_QUIET_S = 10.0  # of waiting, before it is said
_NONCE = 32
_MOST_HELLO = 1 << 20
_HINTS = {  # what to change where rank 0 cannot listen
    errno.EADDRINUSE: "give all nodes another --master-port, or end what listens there",
    errno.EADDRNOTAVAIL: "--master-addr must be an address of the host of --node-rank 0",
}
_BEATS = (1 << 63, (1 << 63) + 1)  # in the place of a length: starting, serving


class GangRefused(ValueError):
    """Members of an instance do not fit together; the message says what differs."""


@dataclasses.dataclass(frozen=True)
class GangPlace:
    """A process's place in an instance over several hosts."""

    rank: int
    size: int
    address: tuple[str, int]  # where rank 0 listens
    secret: bytes = dataclasses.field(repr=False)
    wait_s: float = 600.0  # for the other members

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET:
            raise GangRefused(
                f"The secret of the nodes has {len(self.secret)} bytes; at least {MIN_SECRET}: "
                "openssl rand -hex 32"
            )


class Connection:
    """Frames over a connected socket; one thread sends at a time, another receives."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock

    def send(self, value: Any) -> None:
        """Send a value; blocks while the other side takes nothing."""
        payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        self._sock.sendall(struct.pack("<Q", len(payload)) + payload)

    def beat(self, *, serving: bool) -> None:
        """Tell the other side that this one is there."""
        self._sock.sendall(struct.pack("<Q", _BEATS[serving]))

    def receive(self, silent_s: float) -> tuple[bool, Any]:
        """Return (True, whether it serves) of a heartbeat, (False, value) of a value.

        Raises ConnectionError when the other side has gone, TimeoutError when it is silent.
        """
        (length,) = struct.unpack("<Q", self.exactly(8, silent_s))
        if length in _BEATS:
            return True, length == _BEATS[1]
        return False, pickle.loads(self.exactly(length, silent_s))

    def exactly(self, size: int, silent_s: float, end_s: float = math.inf) -> bytes:
        """Return so many bytes, before `end_s` of time.monotonic; raises as `receive`."""
        parts, left = [], size
        poll = select.poll()  # a front of many connections has descriptors above select's last one
        poll.register(self._sock, select.POLLIN)
        while left:
            wait_s = min(silent_s, end_s - time.monotonic())
            if wait_s <= 0 or not poll.poll(1000 * wait_s):
                raise TimeoutError(f"no word for {silent_s:g} s")
            part = self._sock.recv(min(left, 1 << 20))
            if not part:
                raise ConnectionError("the connection was closed")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def send_text(self, value: Mapping[str, Any]) -> bytes:
        """Send JSON, which is safe to read before a proof; return its bytes."""
        text = json.dumps(value).encode()
        self._sock.sendall(struct.pack("<Q", len(text)) + text)
        return text

    def receive_text(self) -> bytes:
        """Return the bytes of JSON; ConnectionError for too many."""
        end_s = time.monotonic() + _HELLO_S
        (length,) = struct.unpack("<Q", self.exactly(8, _HELLO_S, end_s))
        if length > _MOST_HELLO:
            raise ConnectionError(f"a greeting of {length} bytes")
        return self.exactly(length, _HELLO_S, end_s)

    def receive_proof(self, size: int) -> bytes:
        """Return so many bytes of a proof, which come soon; raises as `receive`."""
        return self.exactly(size, _HELLO_S, time.monotonic() + _HELLO_S)

    def raw(self, data: bytes) -> None:
        """Send bytes without a frame."""
        self._sock.sendall(data)

    def close(self) -> None:
        """Close the socket; a thread that waits for it is told."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def gather_followers(
    place: GangPlace, about: Mapping[str, Any], coordinator: str
) -> dict[int, Connection]:
    """Return rank 0's connections to all other ranks.

    A stranger without the secret is sent away and logged. Raises GangRefused for a member that
    differs, for a taken port, and when not all have come in time.
    """
    listener = listen(place.address)
    connections: dict[int, Connection] = {}
    end = time.monotonic() + place.wait_s
    with listener, contextlib.ExitStack() as undo:
        while len(connections) < place.size - 1:
            listener.settimeout(max(0.1, end - time.monotonic()))
            try:
                sock, peer = listener.accept()
            except TimeoutError:
                missing = sorted(set(range(1, place.size)) - set(connections))
                raise GangRefused(
                    f"Nodes {missing} of {place.size} have not come within {place.wait_s:g} s."
                ) from None
            sock.settimeout(None)
            connection = Connection(sock)
            undo.callback(connection.close)
            try:
                connections[welcome(connection, place, about, coordinator, connections)] = (
                    connection
                )
            except (OSError, KeyError, TypeError) as error:
                logger.warning(
                    "Rejected a connection from %s, which is no member of this instance: %s",
                    peer[0],
                    error,
                )
                connection.close()
        undo.pop_all()
    return connections


def listen(address: tuple[str, int]) -> socket.socket:
    """Return a socket where the others find rank 0. Raises GangRefused where that cannot be."""
    host, port = address
    try:
        return socket.create_server(address)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno in _HINTS else error.strerror or str(error)
        hint = _HINTS.get(error.errno or 0, "it must be an address of node 0 and a free port")
        raise GangRefused(
            f"Cannot listen on --master-addr {host} --master-port {port}: {why}; {hint}."
        ) from None


def is_loopback(host: str) -> bool:
    """Return whether a name or an address leads to the host that asks, as far as it is known."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


def reach_of(host: str) -> str:
    """Return a sentence about a --master-addr that leads each host to itself, else ""."""
    if not is_loopback(host):
        return ""
    return (
        f" {host} is this host's own loopback: other hosts do not find rank 0 there. Give all "
        "nodes the address that host 0 has on the network as --master-addr, unless they are all "
        "on this host."
    )


def join_leader(place: GangPlace, about: Mapping[str, Any]) -> tuple[Connection, str]:
    """Return the connection to rank 0, and where jax's coordinator is.

    Waits for rank 0. Raises GangRefused when it refuses this process, or does not come.
    """
    began, is_said = time.monotonic(), False
    end = began + place.wait_s
    while True:
        try:
            connection = Connection(_connect(place.address))
            with contextlib.ExitStack() as undo:
                undo.callback(connection.close)
                coordinator = _introduce(connection, place, about)
                undo.pop_all()
            return connection, coordinator
        except OSError as error:
            if time.monotonic() > end:
                host, port = place.address
                raise GangRefused(
                    f"Rank 0 does not answer at {host}:{port} after {place.wait_s:g} s: {error}"
                ) from None
            if not is_said and time.monotonic() > began + _QUIET_S:
                is_said = True
                text = (
                    "Rank 0 does not answer at %s:%d yet (%s); node %d waits up to %g s for it.%s"
                )
                more = reach_of(place.address[0])
                logger.warning(text, *place.address, error, place.rank, place.wait_s, more)
            time.sleep(_RETRY_S)


def _connect(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address, _HELLO_S)
    sock.settimeout(None)
    return sock


def welcome(
    connection: Connection,
    place: GangPlace,
    about: Mapping[str, Any],
    coordinator: str,
    taken: Container[int],
) -> int:
    """Return the rank of a new member, after sending it the coordinator's address.

    Ranks that are `taken` have come. Raises OSError, KeyError, TypeError or ValueError for one that
    is no member, and GangRefused for one that differs.
    """
    nonce = secrets.token_bytes(_NONCE)
    connection.raw(nonce)
    text = connection.receive_text()
    if not hmac.compare_digest(connection.receive_proof(32), _proof(place, nonce, text)):
        connection.send_text({"why": "the secret is not rank 0's: give all nodes the same file"})
        raise ConnectionError("a wrong secret")
    hello = json.loads(text)
    rank = hello["rank"]
    why = difference(about, hello["about"], "on rank 0", f"on node {rank}")
    if rank in taken or not 0 < rank < place.size:
        why = f"--node-rank {rank} is taken, or not in [1, {place.size - 1}]"
    answer = connection.send_text({"why": why} if why else {"coordinator": coordinator})
    connection.raw(_proof(place, bytes.fromhex(hello["nonce"]), answer))
    if why:
        raise GangRefused(f"Node {rank} does not fit: {why}.")
    return rank


def _introduce(connection: Connection, place: GangPlace, about: Mapping[str, Any]) -> str:
    """Return the coordinator's address from rank 0, to which this process proves itself."""
    nonce, own_nonce = connection.receive_proof(_NONCE), secrets.token_bytes(_NONCE)
    hello = {"rank": place.rank, "nonce": own_nonce.hex(), "about": dict(about)}
    text = connection.send_text(hello)
    connection.raw(_proof(place, nonce, text))
    answer = connection.receive_text()
    verdict = json.loads(answer)
    if "why" in verdict:
        raise GangRefused(f"Rank 0 refuses node {place.rank}: {verdict['why']}.")
    if not hmac.compare_digest(connection.receive_proof(32), _proof(place, own_nonce, answer)):
        raise GangRefused("Rank 0 does not know the secret: give all nodes the same file.")
    return verdict["coordinator"]


def _proof(place: GangPlace, nonce: bytes, text: bytes) -> bytes:
    return hmac.digest(place.secret, nonce + hashlib.sha256(text).digest(), "sha256")
