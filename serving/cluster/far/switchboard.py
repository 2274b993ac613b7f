"""Connections to role processes of other hosts: each process calls here, and proves that it may.

Both sides prove by HMAC that they know the secret of this start (multiprocessing.connection), then
the process names its connection by a ticket. Nothing that comes in is unpickled. No jax, no ray.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from serving.cluster.addresses import notice_lost_hosts
from serving.cluster.far.callers import take_callers

logger = logging.getLogger(__name__)

_CONNECT_S = 4.0  # to the command's host: some packets may be lost
_PROOF_S = 10.0  # for a caller to prove itself, and to name its ticket
_MOST_TICKET = 64  # bytes


@dataclasses.dataclass(frozen=True)
class Ticket:
    """The other end of a connection, for a process of another host."""

    address: tuple[str, int]
    secret: bytes = dataclasses.field(repr=False)
    name: bytes = dataclasses.field(repr=False)

    def redeem(self) -> Connection:
        """Return the connection, in the process that it is for.

        Raises ConnectionError where the command's host cannot be reached, or ends it.
        """
        try:
            sock = socket.create_connection(self.address, _CONNECT_S)
            sock.settimeout(None)
            notice_lost_hosts(sock)
            connection = Connection(sock.detach())
            answer_challenge(connection, self.secret)
            deliver_challenge(connection, self.secret)
            connection.send_bytes(self.name)
        except (OSError, EOFError) as error:
            (host, port), why = self.address, str(error) or "it was ended"
            raise ConnectionError(
                f"No connection to the command's host at {host}:{port} ({why}): its free "
                "ports must be open to this host."
            ) from error
        return connection

    def close(self) -> None:
        """Nothing is held until it is redeemed."""


class Switchboard:
    """Listens at an address of this host, until it is closed."""

    def __init__(self, host: str):
        """Raises OSError when the host has no such address."""
        self.secret = secrets.token_bytes(32)
        self._listening = socket.create_server((host, 0), backlog=64)
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self._lock = threading.Lock()
        self._waiting: dict[bytes, Connection] = {}  # inner ends, by ticket
        self._lines: dict[bytes, Connection] = {}  # those that are connected
        take_callers(self._listening, self._welcome, "switchboard")

    def ticket(self) -> tuple[Connection, Ticket]:
        """Return this side of a new connection, and the ticket to its other side.

        Tickets that nobody has redeemed end with their connection's own side.
        """
        ours, inner = Pipe()
        ticket = Ticket(self.address, self.secret, secrets.token_hex(16).encode())
        with self._lock:
            for name in [name for name, end in self._waiting.items() if _is_left(end)]:
                self._waiting.pop(name).close()
            self._waiting[ticket.name] = inner
        return ours, ticket

    def drop(self, ticket: Ticket) -> None:
        """End a connection whose process has ended; its reader here gets an error."""
        with self._lock:
            waiting = self._waiting.pop(ticket.name, None)
            line = self._lines.get(ticket.name)
            if line is not None:
                _shut_down(line)
        if waiting is not None:
            waiting.close()

    def close(self) -> None:
        """Take no more calls; connections last."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _welcome(self, sock: socket.socket, peer: str) -> Callable[[], None] | None:
        """Let a process name its ticket; return what carries its connection."""
        notice_lost_hosts(sock)
        far = Connection(sock.detach())
        try:
            with _within(far, _PROOF_S):
                deliver_challenge(far, self.secret)
                answer_challenge(far, self.secret)
                name = far.recv_bytes(_MOST_TICKET)
        except (OSError, EOFError, ValueError, AuthenticationError) as error:
            why = str(error) or "no proof came"
            logger.warning(
                "Rejected a connection from %s, which is no role of this cluster: %s", peer, why
            )
            far.close()
            return None
        with self._lock:
            inner = self._waiting.pop(name, None)
            if inner is not None:
                self._lines[name] = inner
        if inner is None:
            far.close()
            return None
        return functools.partial(self._carry, name, inner, far)

    def _carry(self, name: bytes, inner: Connection, far: Connection) -> None:
        """Pass messages on in both directions until one side ends."""
        back = threading.Thread(target=_pump, args=(far, inner), daemon=True)
        back.start()
        _pump(inner, far)
        back.join()
        with self._lock:
            del self._lines[name]
        inner.close()
        far.close()


def _pump(source: Connection, target: Connection) -> None:
    with contextlib.suppress(OSError, EOFError):
        while True:
            target.send_bytes(source.recv_bytes())
    for end in (source, target):
        _shut_down(end)


def _is_left(end: Connection) -> bool:
    """Return whether the other end of a pipe has been closed."""
    poll = select.poll()
    poll.register(end.fileno(), select.POLLHUP)
    return bool(poll.poll(0))


def _shut_down(connection: Connection) -> None:
    """Let both sides of a connection read its end, and leave the descriptor open."""
    with _socket_of(connection) as sock:
        _end(sock)


def _socket_of(connection: Connection) -> socket.socket:
    """Return another descriptor of a connection, as the socket that it is."""
    return socket.socket(fileno=os.dup(connection.fileno()))


@contextlib.contextmanager
def _within(connection: Connection, seconds: float) -> Iterator[None]:
    """Shut the connection down unless the block ends in time, however little by little it hears."""
    with _socket_of(connection) as sock:
        late = threading.Timer(seconds, _end, (sock,))
        late.daemon = True
        late.start()
        try:
            yield
        finally:
            late.cancel()
            late.join()


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
