"""Routes for health, metrics, load and version."""

import dataclasses
import importlib.metadata
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import generate_latest

from serving.http.server import server_of

router = APIRouter()
PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@router.get("/health", response_class=Response)
@router.get("/ping", response_class=Response)
@router.post("/ping", response_class=Response)
async def health(request: Request) -> Response:
    """Return an empty 200, or 503 when the engine is dead or stuck."""
    return Response(status_code=200 if server_of(request).engine.is_alive() else 503)


@router.get("/ready", response_class=Response)
async def ready(request: Request) -> Response:
    """Return an empty 200 while requests are taken, else 503."""
    return await health(request)


@router.get("/live", response_class=Response)
async def live() -> Response:
    """Return an empty 200: the process answers, whatever its engine does."""
    return Response(status_code=200)


@router.get("/metrics", response_class=PlainTextResponse)
@router.get("/metrics/", include_in_schema=False)
def metrics(request: Request) -> Response:
    """Return the engine's and the HTTP server's metrics in Prometheus' text format."""
    server = server_of(request)
    parts = [generate_latest(r) for r in (server.engine.metrics.registry, server.metrics.registry)]
    return Response(b"".join(parts), media_type=PLAIN_TEXT)


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Return how many requests for text are in flight."""
    return {"server_load": server_of(request).metrics.generating}


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the version of this package."""
    return {"version": importlib.metadata.version("lora-jax")}


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """Return the model's name, sizes, and which implementation serves each op; no path, no key."""
    server = server_of(request)
    config = dataclasses.asdict(server.engine.config)
    sizes = {k: v for k, v in config.items() if isinstance(v, int | float)}
    sizes |= {"dtype": config["dtype"], "max_model_len": server.max_model_len}
    stats = server.engine.stats()
    state = {"running": stats.running, "waiting": stats.waiting}
    about = {"config": sizes, "state": state, "implementations": stats.implementations}
    return {**await version(), "model": server.names.base, **about}
