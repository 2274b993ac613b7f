"""HTTP in a function, which listens nowhere: its agent hands it connections, one per request."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from prometheus_client import generate_latest
from uvicorn.server import ServerState

from serving.functions.callers import CallerRing, token_of
from serving.http.access.keys import Caller
from serving.http.app import create_app
from serving.http.settings import HttpSettings
from serving.http.wire.uvicorn_server import uvicorn_config

_ENDED_S = 10.0  # for an answer of a few tokens


class HttpSide:
    """The OpenAI routes of one engine, over connections that others have opened."""

    def __init__(self, engine: Any, settings: HttpSettings, budgets_folder: str | None = None):
        """Start the thread of the routes; it ends with the process."""
        self._engine, self._settings = engine, settings
        app = create_app(engine, settings, keys=CallerRing(budgets_folder))
        self._metrics = app.state.server.metrics
        self._config = uvicorn_config(app, lifespan="off")
        self._config.load()
        self._state = ServerState()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="http", daemon=True).start()

    def adopt(self, fd: int, closed: Callable[[], None]) -> None:
        """Answer the requests of a connection, which is this object's from here on.

        `closed` is called on the thread of the routes when it has been closed.
        """
        sock = socket.socket(fileno=fd)
        protocol_class: Any = self._config.http_protocol_class

        class Adopted(protocol_class):
            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                closed()

        def protocol() -> asyncio.Protocol:
            return Adopted(config=self._config, server_state=self._state, app_state={})

        async def take() -> None:
            try:
                await self._loop.connect_accepted_socket(protocol, sock)
            except OSError:  # it has gone already
                sock.close()
                closed()

        asyncio.run_coroutine_threadsafe(take(), self._loop)

    def rehearse(self, adapter: str | None, prompt: str) -> int:
        """Ask the routes of text as a client would; return how many answered. None is counted.

        Nothing is asked where each request is written to a log.
        """
        if self._settings.log_requests:
            return 0
        model = {"model": adapter or self._settings.served_names[0], "max_tokens": 1}
        messages = [{"role": "user", "content": prompt}]
        asked = {
            "/v1/completions": model | {"prompt": prompt},
            "/v1/chat/completions": model | {"messages": messages, "stream": True},
        }
        try:
            answers = [self._ask(path, body) for path, body in asked.items()]
        finally:
            self._metrics.forget_requests()
        return sum(answer.startswith(b"HTTP/1.1 200") for answer in answers)

    def _ask(self, path: str, body: dict[str, Any]) -> bytes:
        """Return the answer to a POST, over a connection as an agent hands it in."""
        ours, theirs = socket.socketpair()
        ended, data = threading.Event(), json.dumps(body).encode()
        self.adopt(theirs.detach(), ended.set)
        head = f"POST {path} HTTP/1.1\r\nHost: function\r\nConnection: close\r\n"
        head += f"Authorization: Bearer {token_of(Caller())}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        with ours:
            ours.settimeout(_ENDED_S)
            ours.sendall(head.encode() + data)
            answer = b"".join(iter(lambda: ours.recv(1 << 16), b""))
        ended.wait(_ENDED_S)  # then it has been counted
        return answer

    def metrics_text(self) -> str:
        """Return the engine's and the routes' metrics in Prometheus' text format."""
        registries = (self._engine.metrics.registry, self._metrics.registry)
        return b"".join(map(generate_latest, registries)).decode()
