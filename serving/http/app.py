"""The FastAPI application over one engine: routers, and the layers every request passes."""

import functools

from fastapi import FastAPI

from serving.adapters.journal import Journal
from serving.api.examples import Examples
from serving.http.access.auth import Authenticate
from serving.http.access.keys import KeyRing
from serving.http.access.observe import Observe
from serving.http.errors import CatchAll, install
from serving.http.interface import AbstractEngine
from serving.http.requests.body import OneLength
from serving.http.routes import (
    adapters,
    chat,
    classify,
    completions,
    demo,
    docs,
    health,
    models,
    responses,
    rollouts,
    tokenize,
)
from serving.http.routes.absent import Absent
from serving.http.routes.description import ABOUT, describe
from serving.http.server import Server
from serving.http.settings import HttpSettings


def create_app(
    engine: AbstractEngine,
    settings: HttpSettings | None = None,
    examples: Examples | None = None,
    journal: Journal | None = None,
    keys: KeyRing | None = None,
) -> FastAPI:
    """Return the application; it neither starts nor closes the engine.

    `examples` are what the demo page suggests to ask. Loads and unloads over HTTP are recorded in
    the journal, where there is one. `keys` are those of the settings, unless given.
    A request passes, in this order: its id and counters, unexpected errors, its length, the key,
    the route.
    """
    settings = settings or HttpSettings()
    openapi_url = "/openapi.json" if settings.docs else None
    app = FastAPI(
        title="lora-jax",
        description=ABOUT,
        docs_url=None,
        redoc_url=None,
        openapi_url=openapi_url,
        redirect_slashes=False,
    )
    server = Server.build(engine, settings, journal, keys)
    app.state.server = server
    generating = (completions, chat, responses, classify)
    for room in (models, *generating, tokenize, adapters, rollouts, health):
        app.include_router(room.router)
    if settings.docs:
        app.include_router(docs.router)
    if settings.demo:
        app.state.examples = examples or Examples()
        app.include_router(demo.router)
    app.router.default = Absent(app)
    app.openapi = functools.partial(describe, app)
    install(app)
    # The one added last is the outermost.
    app.add_middleware(Authenticate, keys=server.keys, metrics=server.metrics, demo=settings.demo)
    app.add_middleware(OneLength)
    app.add_middleware(CatchAll)
    audit = None if settings.is_behind_front else server.audit
    app.add_middleware(Observe, metrics=server.metrics, audit=audit, access_log=settings.access_log)
    return app
