"""The FastAPI application over one engine: routers, and the layers every request passes."""

import functools
from typing import Any

from fastapi import FastAPI

from serving.http import adapters, chat, completions, demo, health, models, tokenize
from serving.http.auth import Authenticate
from serving.http.body import OneLength
from serving.http.errors import CatchAll, install
from serving.http.interface import AbstractEngine
from serving.http.observe import Observe
from serving.http.protocol import body_schemas
from serving.http.server import Server
from serving.http.settings import HttpSettings


def create_app(engine: AbstractEngine, settings: HttpSettings | None = None) -> FastAPI:
    """Return the application; it neither starts nor closes the engine.

    A request passes, in this order: its id and counters, unexpected errors, its length, the key,
    the route.
    """
    settings = settings or HttpSettings()
    app = FastAPI(title="lora-jax", docs_url=None, redoc_url=None, redirect_slashes=False)
    server = Server.build(engine, settings)
    app.state.server = server
    for room in (models, completions, chat, tokenize, adapters, health):
        app.include_router(room.router)
    if settings.demo:
        app.include_router(demo.router)
    app.openapi = functools.partial(_describe, app)
    install(app)
    # The one added last is the outermost.
    app.add_middleware(Authenticate, keys=server.keys, metrics=server.metrics, demo=settings.demo)
    app.add_middleware(OneLength)
    app.add_middleware(CatchAll)
    app.add_middleware(
        Observe, metrics=server.metrics, audit=server.audit, access_log=settings.access_log
    )
    return app


def _describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description, with the bodies that the routes read themselves."""
    if not app.openapi_schema:
        schema = FastAPI.openapi(app)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(body_schemas())
    return app.openapi_schema or {}
