"""HTTP in a function, which listens nowhere: its agent hands it connections, one per request."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

from prometheus_client import generate_latest
from uvicorn.server import ServerState

from serving.functions.callers import CallerRing
from serving.http.app import create_app
from serving.http.settings import HttpSettings
from serving.http.wire.uvicorn_server import uvicorn_config


class HttpSide:
    """The OpenAI routes of one engine, over connections that others have opened."""

    def __init__(self, engine: Any, settings: HttpSettings, budgets_folder: str | None = None):
        """Start the thread of the routes; it ends with the process."""
        self._engine = engine
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

    def metrics_text(self) -> str:
        """Return the engine's and the routes' metrics in Prometheus' text format."""
        registries = (self._engine.metrics.registry, self._metrics.registry)
        return b"".join(map(generate_latest, registries)).decode()
