"""A real uvicorn in a thread of the test, configured as serving.launch does."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import uvicorn
from fastapi import FastAPI

from serving.http.wire.uvicorn_server import uvicorn_config


@contextlib.contextmanager
def serve_app(app: FastAPI) -> Iterator[str]:
    """Serve the app on a free port and yield its base URL."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(app))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        sock.close()


@contextlib.contextmanager
def client_of(app: FastAPI, **headers: str) -> Iterator[httpx.Client]:
    """Serve the app and yield a client of it."""
    with serve_app(app) as url, httpx.Client(base_url=url, headers=headers, timeout=30) as client:
        yield client
