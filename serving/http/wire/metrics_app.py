"""GET /metrics on a port of its own, for whoever can reach that port, from its own thread."""

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http.wire.uvicorn_server import let_next_bind, uvicorn_config

PLAIN_TEXT = b"text/plain; version=0.0.4; charset=utf-8"


def metrics_app(registries: Sequence[CollectorRegistry]) -> ASGIApp:
    """Return an application that answers GET /metrics and nothing else."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        served = scope["path"] in ("/metrics", "/metrics/") and scope["method"] in ("GET", "HEAD")
        body = b"".join(map(generate_latest, registries)) if served else b"Not found.\n"
        headers = [(b"content-type", PLAIN_TEXT), (b"content-length", str(len(body)).encode())]
        status = 200 if served else 404
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


@contextlib.contextmanager
def serve_metrics(sock: socket.socket, registries: Sequence[CollectorRegistry]) -> Iterator[None]:
    """Answer on the bound socket until the block ends; a caller that comes at once waits."""
    config = uvicorn_config(metrics_app(registries), lifespan="off")
    server = uvicorn.Server(config)
    let_next_bind(sock)
    sock.listen(config.backlog)  # the thread would do so a moment later
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [sock]}, name="metrics", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
