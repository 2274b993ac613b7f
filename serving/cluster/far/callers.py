"""Callers at a listening socket, any of whom may be a stranger: a bounded number proves itself."""

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_MOST_UNPROVEN = 64  # at a time: each has a thread and a descriptor, and a stranger pays nothing
_AGAIN_S = 0.5  # after an error: descriptors or threads may be short for a while
_CLOSED = (errno.EBADF, errno.EINVAL)  # of a socket that was closed or shut down


def take_callers(
    listening: socket.socket,
    admit: Callable[[socket.socket, str], Callable[[], None] | None],
    name: str,
) -> None:
    """Start a thread that takes callers, each on its own thread, until the socket is closed.

    `admit` is given a connection and its address. It lets the caller prove itself, within a bounded
    time, and returns what the thread does next, if anything. Further callers wait meanwhile.
    """
    room = threading.Semaphore(_MOST_UNPROVEN)

    def welcome(sock: socket.socket, address: str) -> None:
        try:
            then = admit(sock, address)
        finally:
            room.release()
        if then is not None:
            then()

    def run() -> None:
        while True:
            room.acquire()
            try:
                sock, peer = listening.accept()
                threading.Thread(target=welcome, args=(sock, peer[0]), daemon=True).start()
            except (OSError, RuntimeError) as error:  # a RuntimeError of a thread
                room.release()
                if isinstance(error, OSError) and error.errno in _CLOSED:
                    return
                logger.warning("No connection can be taken now (%s): %s", name, error)
                time.sleep(_AGAIN_S)

    threading.Thread(target=run, name=name, daemon=True).start()
