"""Rendezvous of two processes over a socket: terms one way, an answer the other.

A message is 4 bytes of length and that much JSON; on a Unix socket descriptors ride with the
answer. The connection stays open afterwards, and its end says that the other side has gone, killed
or not.
"""

import contextlib
import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from serving.lora_server.transport.base import TransportError

_LONGEST = 1 << 16
_SECONDS = 2.0  # for one side to answer the other
_RETRY_SECONDS = 0.02
MOST_CLIENTS = 64
# A peer whose host lost power says nothing: after 5 s of silence it is asked every 5 s, and after
# 20 s without an answer, or with bytes that it has not taken, the connection is over.
_KEEPALIVE = {
    (socket.SOL_SOCKET, "SO_KEEPALIVE"): 1,
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE"): 5,
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL"): 5,
    (socket.IPPROTO_TCP, "TCP_KEEPCNT"): 3,
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT"): 20_000,  # ms
}

Address = str | Path | tuple[str, int]  # of a Unix socket, or a host and port
# Whether the other side of a connection may speak at all. Raises TransportError.
Admit = Callable[[socket.socket], None]


@dataclasses.dataclass(frozen=True)
class Guest:
    """Listener's side of a client: sends the answer, stays, and learns of its end.

    The descriptors are the listener's to close. `gone` is called once, whatever went wrong.
    """

    answer: dict
    fds: list[int]
    stay: Callable[[socket.socket], None]
    gone: Callable[[], None]


@contextlib.contextmanager
def owned(listening: socket.socket) -> Iterator[None]:
    """Close a socket that is the caller's now if the block fails."""
    try:
        yield
    except BaseException:
        listening.close()
        raise


class Listener:
    """Lets clients in at a listening socket, each on a thread of its own, until `close`."""

    def __init__(
        self,
        listening: socket.socket,
        welcome: Callable[[dict], Guest],
        admit: Admit | None = None,
    ):
        """`welcome` takes what a client said; it raises TransportError to refuse."""
        self._socket, self._welcome, self._admit = listening, welcome, admit
        self.address = listening.getsockname()
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name="transport-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close every connection and wait for the threads; a Unix socket's path is removed."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        if isinstance(self.address, str):
            Path(self.address).unlink(missing_ok=True)
        with self._lock:
            open_now = list(self._connections.items())
        for connection, _ in open_now:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for _, thread in open_now:
            thread.join()

    def _accept(self) -> None:
        with self._socket:
            while True:
                try:
                    connection, _ = self._socket.accept()
                except OSError:  # closed
                    return
                thread = threading.Thread(
                    target=self._attend, args=(connection,), name="transport-client", daemon=True
                )
                with self._lock:
                    full = len(self._connections) >= MOST_CLIENTS
                    if not full:
                        self._connections[connection] = thread
                if full:
                    connection.close()
                else:
                    thread.start()

    def _attend(self, connection: socket.socket) -> None:
        """Shake hands with one client and stay until it has gone."""
        try:
            with connection:
                self._shake(connection)
        finally:
            with self._lock:
                del self._connections[connection]

    def _shake(self, connection: socket.socket) -> None:
        connection.settimeout(_SECONDS)
        try:
            _set_options(connection)
            if self._admit is not None:
                self._admit(connection)
            guest = self._welcome(receive(connection)[0])
        except TransportError as error:
            with contextlib.suppress(OSError):
                _refuse(connection, str(error))
            return
        except (OSError, ValueError):
            return
        try:
            with contextlib.suppress(OSError):
                send(connection, guest.answer, guest.fds)
                connection.settimeout(None)
                guest.stay(connection)
        finally:
            for fd in guest.fds:
                os.close(fd)
            guest.gone()


def _refuse(connection: socket.socket, why: str) -> None:
    """Say why, and close only when the other side has heard: unread words would cut that off."""
    send(connection, {"refused": why})
    connection.shutdown(socket.SHUT_WR)
    deadline = _Deadline(connection)
    for _ in range(_LONGEST // 1024):
        deadline.wait_no_longer()
        if not connection.recv(1024):
            return


def call(
    address: Address,
    message: dict,
    num_fds: int,
    admit: Admit | None = None,
    patience: float = 0.0,
) -> tuple[socket.socket, dict, list[int]]:
    """Return a connection to the listener at `address`, its answer and its descriptors.

    Each step may take `patience` seconds, or as long as usual where that is more.

    Raises:
        ConnectionError: nobody listens there.
        TransportError: a refusal, in the listener's words, or an answer that cannot be read.
    """
    connection = connect(address, max(_SECONDS, patience))
    fds: list[int] = []
    try:
        if admit is not None:
            admit(connection)
        send(connection, message)
        answer, fds = receive(connection, num_fds)
        if "refused" in answer:
            raise TransportError(str(answer["refused"]))
        if len(fds) != num_fds:
            raise TransportError(f"{address} sent {len(fds)} descriptors, expected {num_fds}")
    except BaseException as error:
        connection.close()
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError | ValueError):
            raise TransportError(f"{address} did not answer: {error}") from error
        raise
    connection.settimeout(None)
    return connection, answer, fds


def connect(address: Address, seconds: float | None = None) -> socket.socket:
    """Return a connection whose every step is bounded. Raises OSError if nobody listens."""
    seconds = _SECONDS if seconds is None else seconds
    if isinstance(address, tuple):
        connection = socket.create_connection(address, seconds)
        _set_options(connection)
        return connection
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(str(address))
    except BaseException:
        connection.close()
        raise
    return connection


def _set_options(connection: socket.socket) -> None:
    """Let TCP send at once and find out that the other host has gone."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for (level, name), value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not every system has all of them
            connection.setsockopt(level, getattr(socket, name), value)


def wait_for_listener(address: Address, seconds: float) -> None:
    """Return when somebody listens. Raises OSError if nobody does for `seconds`."""
    end = time.monotonic() + seconds
    while True:
        try:
            return connect(address).close()
        except OSError:
            if time.monotonic() >= end:
                raise
        time.sleep(_RETRY_SECONDS)


class Watch:
    """A thread that stays with a connection and calls `lost()` when the other side has gone."""

    def __init__(
        self,
        connection: socket.socket,
        stay: Callable[[socket.socket], None],
        lost: Callable[[], None],
    ):
        self._connection, self._stay, self._lost = connection, stay, lost
        self._thread = threading.Thread(target=self._run, name="transport-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection and the thread; calls `lost()` too."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        try:
            self._stay(self._connection)
        finally:
            self._lost()


def wait_for_end(connection: socket.socket) -> None:
    """Return when the other side has gone."""
    with contextlib.suppress(OSError):
        while connection.recv(64):  # nothing is said any more
            pass


def unix_listener(path: str | Path) -> socket.socket:
    """Return a listening socket at a path, to which this user alone may connect.

    The path of a dead process is taken over. Raises ValueError if a living one listens there.
    """
    path = Path(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            _remove_dead(path)
        listener.bind(str(path))
        path.chmod(0o600)  # before listen: nobody could have connected
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_dead(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_SECONDS)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except TimeoutError:
            pass
    raise ValueError(f"another process listens at {path}; choose another path or end it")


def send(connection: socket.socket, message: dict, fds: Sequence[int] = ()) -> None:
    """Send a message, with descriptors on a Unix socket."""
    text = json.dumps(message).encode()
    head = len(text).to_bytes(4, "little")
    if fds:
        socket.send_fds(connection, [head], list(fds))
    else:
        connection.sendall(head)
    connection.sendall(text)


class _Deadline:
    """A connection's time limit counts from now on for several calls together."""

    def __init__(self, connection: socket.socket):
        self._connection, self._seconds = connection, connection.gettimeout()
        self._end = time.monotonic() + (self._seconds or 0.0)

    def wait_no_longer(self) -> None:
        """Give the next call what is left. Raises TimeoutError where that is nothing."""
        if self._seconds is not None:
            left = self._end - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out in the middle of a message")
            self._connection.settimeout(left)

    def restore(self) -> None:
        """Give later calls the connection's own limit again."""
        self._connection.settimeout(self._seconds)


def receive(connection: socket.socket, num_fds: int = 0) -> tuple[dict, list[int]]:
    """Return a message and its descriptors, within the time limit of the connection for a call.

    Raises OSError, and ValueError for other bytes.
    """
    deadline = _Deadline(connection)
    try:
        return _receive(connection, num_fds, deadline)
    finally:
        deadline.restore()


def _receive(
    connection: socket.socket, num_fds: int, deadline: _Deadline
) -> tuple[dict, list[int]]:
    if num_fds:
        head, fds, _, _ = socket.recv_fds(connection, 4, num_fds, socket.MSG_CMSG_CLOEXEC)
    else:
        head, fds = b"", []
    try:
        head += _exactly(connection, 4 - len(head), deadline)
        length = int.from_bytes(head, "little")
        if length > _LONGEST:
            raise ValueError(f"a message of {length} bytes is not one of ours")
        try:
            message = json.loads(_exactly(connection, length, deadline))
        except RecursionError:
            raise ValueError("a message of too many levels") from None
        if not isinstance(message, dict):
            raise ValueError("a message that is not an object")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds


def _exactly(connection: socket.socket, count: int, deadline: _Deadline) -> bytes:
    data = b""
    while len(data) < count:
        deadline.wait_no_longer()
        part = connection.recv(count - len(data))
        if not part:
            raise ValueError("the connection ended in the middle of a message")
        data += part
    return data
