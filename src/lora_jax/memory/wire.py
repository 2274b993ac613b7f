"""Messages of processes that show memory to each other: a JSON header, then descriptors. No jax.

A header is 8 bytes of length and that much JSON; descriptors (SCM_RIGHTS) come with one byte per
batch. Who may connect is the business of whoever opened the socket.
"""

import contextlib
import itertools
import json
import os
import resource
import select
import socket
from collections.abc import Sequence
from typing import Any

BATCH = 250  # Linux carries at most 253 descriptors in a message
_LONGEST_HEADER = 1 << 24


class ShareError(ConnectionError):
    """The other side went away in the middle, or did not speak as this module does."""


def send_header(connection: socket.socket, fields: dict[str, Any]) -> None:
    """Send one header. Raises OSError: the connection broke."""
    text = json.dumps(fields).encode()
    connection.sendall(len(text).to_bytes(8, "little") + text)


def receive_header(connection: socket.socket) -> dict[str, Any]:
    """Return the next header. Raises ShareError for an end in the middle, and for other talk."""
    length = int.from_bytes(receive(connection, 8), "little")
    if length > _LONGEST_HEADER:
        raise ShareError(f"a header of {length} bytes is not one of ours")
    try:
        fields = json.loads(receive(connection, length))
    except (ValueError, RecursionError) as error:
        raise ShareError(f"the header cannot be read: {error!r}") from error
    if not isinstance(fields, dict):
        raise ShareError(f"the header cannot be read: it is a {type(fields).__name__}")
    return fields


def is_readable(connection: socket.socket, wait_s: float) -> bool:
    """Return whether a message, or the other side's end, can be read within `wait_s` seconds."""
    poll = select.poll()  # select takes no descriptor above 1023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))


def send_fds(connection: socket.socket, fds: Sequence[int]) -> None:
    """Send descriptors, which stay the caller's to close. Raises OSError: the connection broke."""
    for batch in itertools.batched(fds, BATCH):
        socket.send_fds(connection, [b"\0"], list(batch))


def receive_fds(connection: socket.socket, count: int) -> list[int]:
    """Return so many descriptors, the caller's to close. Raises ShareError: fewer came, and closes
    them."""
    received: list[int] = []
    try:
        while len(received) < count:
            wanted = min(BATCH, count - len(received))
            data, fds, flags, _ = socket.recv_fds(connection, 1, BATCH, socket.MSG_CMSG_CLOEXEC)
            received += fds
            if flags & socket.MSG_CTRUNC and len(fds) < wanted:  # the kernel has dropped the rest
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                raise ShareError(
                    f"{len(fds)} of {wanted} descriptors arrived: this process may have {limit} "
                    "open (ulimit -n); raise that limit, or share fewer models in one process"
                )
            if len(data) != 1 or len(fds) != wanted:
                raise ShareError(f"{len(fds)} of {wanted} blocks arrived")
    except BaseException:
        close_all(received)
        raise
    return received


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def receive(connection: socket.socket, count: int) -> bytes:
    """Return so many bytes. Raises ShareError: the connection ended before."""
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ShareError(f"the connection ended after {len(data)} of {count} bytes")
        data += part
    return data
