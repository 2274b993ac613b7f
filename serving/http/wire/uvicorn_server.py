"""uvicorn with h11, its limits, a word when it really answers, and an end in good order."""

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from serving.http.wire.connections import ConnectionLimits, bounded, log_descriptors
from serving.http.wire.drain import Drain

logger = logging.getLogger(__name__)

H11_MAX_INCOMPLETE_EVENT_SIZE = 64 << 10  # bytes of request line and headers
_ACCEPTED = 8  # connections in one turn of the loop; their limits are looked at turns later
_WAITING = 2048  # for that, in the kernel
_CLOSE_S = 1  # for uvicorn to close connections, after all requests were answered or told
_END_S = 2.0  # of the time after SIGTERM, for whatever ends after the requests


def uvicorn_config(
    app: ASGIApp, limits: ConnectionLimits | None = None, **more: Any
) -> uvicorn.Config:
    """Return the configuration of every server here; `more` goes to uvicorn as it is."""
    values: dict[str, Any] = {
        "http": bounded(limits or ConnectionLimits()),
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,  # `Observe` writes it, with the key's id and the adapter
        "server_header": False,
        "proxy_headers": False,
        "h11_max_incomplete_event_size": H11_MAX_INCOMPLETE_EVENT_SIZE,
        "backlog": _ACCEPTED,
        "timeout_graceful_shutdown": _CLOSE_S,
    }
    return uvicorn.Config(app, **(values | more))


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet; OSError when the address is taken.

    It is taken for other servers from now on. Call `let_next_bind` before it listens.
    """
    try:
        return _bound(host, port, reuses=False)
    except OSError:  # perhaps of connections that a server which has ended has left
        return _bound(host, port, reuses=True)


def _bound(host: str, port: int, *, reuses: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def let_next_bind(sock: socket.socket) -> None:
    """Let the next server have the address while connections of this one fade (TIME_WAIT)."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def bind_unix(path: str) -> socket.socket:
    """Return a bound Unix socket of mode 0600; one that nobody listens on any more is replaced.

    Raises OSError where another process listens there, or the path cannot be bound.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            if sock.connect_ex(path) == 0:
                raise OSError(errno.EADDRINUSE, "another process listens on it", path)
            os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError:
        sock.close()
        raise
    return sock


class AnnouncingServer(uvicorn.Server):
    """Calls `announce` once connections are accepted; drains its application before it ends.

    Sockets are accepted from while requests end, so that new ones are told to go elsewhere.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        announce: Callable[[], None],
        drain: Drain | None = None,
        grace_s: float = 25.0,
        ending: Callable[[], None] = lambda: None,
    ):
        """`grace_s` is the time from SIGTERM to the end; `ending` is called when that begins."""
        super().__init__(config)
        self._announce, self._ending = announce, ending
        self._drain, self._grace_s = drain, grace_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        log_descriptors(asyncio.get_running_loop())
        for sock in sockets or ():
            let_next_bind(sock)
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(_WAITING)
        if self.started:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._ending()
        if self._drain is not None and not self.force_exit:
            running = self._drain.running
            logger.info("Ending: %d requests run, at most %g s.", running, self._grace_s)
            await self._drain.finish(max(0.0, self._grace_s - _CLOSE_S - _END_S))
        await super().shutdown(sockets)
