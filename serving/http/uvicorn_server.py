"""uvicorn with h11, its limits, and a word when it really answers."""

import errno
import os
import socket
import stat
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp

H11_MAX_INCOMPLETE_EVENT_SIZE = 64 << 10  # bytes of request line and headers
GRACEFUL_SHUTDOWN_S = 30  # for running requests after SIGTERM


def uvicorn_config(app: ASGIApp, **more: Any) -> uvicorn.Config:
    """Return the configuration of every server here; `more` goes to uvicorn as it is."""
    values: dict[str, Any] = {
        "http": "h11",
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "server_header": False,
        "proxy_headers": False,
        "h11_max_incomplete_event_size": H11_MAX_INCOMPLETE_EVENT_SIZE,
        "timeout_graceful_shutdown": GRACEFUL_SHUTDOWN_S,
    }
    return uvicorn.Config(app, **(values | more))


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet; OSError when the address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def bind_unix(path: str) -> socket.socket:
    """Return a bound Unix socket; one that nobody listens on any more is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            if sock.connect_ex(path) == 0:
                raise OSError(errno.EADDRINUSE, "somebody listens on it", path)
            os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o600)
    except OSError:
        sock.close()
        raise
    return sock


class AnnouncingServer(uvicorn.Server):
    """Calls `announce` once connections are accepted."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]):
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()
