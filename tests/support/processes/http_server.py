"""A real uvicorn in a thread of the test, configured as serving.launch does."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import uvicorn
from starlette.types import ASGIApp

from serving.http.wire.uvicorn_server import uvicorn_config


@contextlib.contextmanager
def serve_app(app: ASGIApp) -> Iterator[str]:
    """Serve the app on a free port and yield its base URL."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with _serving(app, sock):
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@contextlib.contextmanager
def listening(app: ASGIApp, path: Path) -> Iterator[None]:
    """Serve the app on a Unix socket, as an instance does."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        with _serving(app, sock):
            yield


@contextlib.contextmanager
def _serving(app: ASGIApp, sock: socket.socket) -> Iterator[None]:
    server = uvicorn.Server(uvicorn_config(app))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def client_of(app: ASGIApp, **headers: str) -> Iterator[httpx.Client]:
    """Serve the app and yield a client of it."""
    with serve_app(app) as url, httpx.Client(base_url=url, headers=headers, timeout=120) as client:
        yield client
