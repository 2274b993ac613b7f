"""How two processes of one host meet: a Unix socket that carries terms one way, memory the other.

A message is 4 bytes of length and that much JSON; descriptors ride with the answer. The connection
stays open afterwards, and its end says that the other side has gone, killed or not.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from serving.transport.base import TransportError

_LONGEST = 1 << 16
_SECONDS = 2.0  # for one side to answer the other
MOST_CLIENTS = 64

# Given what a client said, returns the answer, descriptors (closed after sending), and what to
# call when it has gone. Raises TransportError to refuse.
Welcome = Callable[[dict], tuple[dict, list[int], Callable[[], None]]]


class Listener:
    """A socket at a path, of which this user alone may connect, until `close`."""

    def __init__(self, path: str | Path, welcome: Welcome):
        """Take the path over from a dead process. Raises ValueError if a living one has it."""
        self.path, self._welcome = Path(path), welcome
        self._socket = _bind(self.path)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._thread = threading.Thread(target=self._accept, name="transport-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close every connection, wait for the threads, and remove the path."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
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
                gone = self._shake(connection)
                if gone is not None:
                    _wait_for_end(connection)
                    gone()
        finally:
            with self._lock:
                del self._connections[connection]

    def _shake(self, connection: socket.socket) -> Callable[[], None] | None:
        connection.settimeout(_SECONDS)
        try:
            said = _receive(connection)[0]
        except (OSError, ValueError):
            return None
        try:
            answer, fds, gone = self._welcome(said)
        except TransportError as error:
            with contextlib.suppress(OSError):
                _send(connection, {"refused": str(error)}, [])
            return None
        try:
            _send(connection, answer, fds)
        except OSError:
            gone()
            return None
        finally:
            for fd in fds:
                os.close(fd)
        return gone


def call(path: str | Path, said: dict, num_fds: int) -> tuple[socket.socket, dict, list[int]]:
    """Return a connection to the listener at `path`, its answer and its descriptors.

    Raises:
        ConnectionError: nobody listens there.
        TransportError: a refusal, in the listener's words, or an answer that cannot be read.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    fds: list[int] = []
    try:
        connection.settimeout(_SECONDS)
        connection.connect(str(path))
        _send(connection, said, [])
        answer, fds = _receive(connection, num_fds)
        if "refused" in answer:
            raise TransportError(str(answer["refused"]))
        if len(fds) != num_fds:
            raise TransportError(f"{path} sent {len(fds)} descriptors, expected {num_fds}")
    except BaseException as error:
        connection.close()
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError | ValueError):
            raise TransportError(f"{path} did not answer: {error}") from error
        raise
    return connection, answer, fds


class Watch:
    """A thread that calls `lost()` when the other side of a connection has gone."""

    def __init__(self, connection: socket.socket, lost: Callable[[], None]):
        self._connection, self._lost = connection, lost
        self._thread = threading.Thread(target=self._run, name="transport-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection and the thread; calls `lost()` too."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        _wait_for_end(self._connection)
        self._lost()


def _bind(path: Path) -> socket.socket:
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


def _wait_for_end(connection: socket.socket) -> None:
    connection.settimeout(None)
    with contextlib.suppress(OSError):
        while connection.recv(64):  # nothing is said any more
            pass


def _send(connection: socket.socket, said: dict, fds: list[int]) -> None:
    text = json.dumps(said).encode()
    head = len(text).to_bytes(4, "little")
    if fds:
        socket.send_fds(connection, [head], fds)
    else:
        connection.sendall(head)
    connection.sendall(text)


def _receive(connection: socket.socket, num_fds: int = 0) -> tuple[dict, list[int]]:
    """Return a message and its descriptors. Raises OSError, and ValueError for other bytes."""
    head, fds, _, _ = socket.recv_fds(connection, 4, num_fds, socket.MSG_CMSG_CLOEXEC)
    try:
        head += _exactly(connection, 4 - len(head))
        length = int.from_bytes(head, "little")
        if length > _LONGEST:
            raise ValueError(f"a message of {length} bytes is not one of ours")
        said = json.loads(_exactly(connection, length))
        if not isinstance(said, dict):
            raise ValueError("a message that is not an object")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return said, fds


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ValueError("the connection ended in the middle of a message")
        data += part
    return data
