"""Around every request: its id in the answer, counts and durations with bounded labels."""

import re
import secrets
import time

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNCOUNTED = frozenset({"/metrics", "/metrics/", "/health", "/load", "/ping", "/version"})
GENERATING = frozenset({"/v1/completions", "/v1/chat/completions"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class HttpMetrics:
    """Counters of one server, with the names of prometheus-fastapi-instrumentator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)  # process_* and python_*
        self.requests = Counter(
            "http_requests",
            "Requests by route, method and class of status.",
            ("handler", "method", "status"),
            registry=self.registry,
        )
        self.seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds until the last byte of the answer, by route and method.",
            ("handler", "method"),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.generating = 0  # requests for text in flight

    def record(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one answered request under its route's template, never its path."""
        handler = getattr(scope.get("route"), "path", "none")
        if handler in UNCOUNTED:
            return
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.requests.labels(handler, method, f"{status // 100}xx").inc()
        self.seconds.labels(handler, method).observe(seconds)


class Observe:
    """Count requests; return the client's X-Request-Id, or a random one. It names nothing here."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics):
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500
        request_id = _request_id(scope)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        generating = scope["path"] in GENERATING
        self._metrics.generating += generating
        try:
            await self.app(scope, receive, watched)
        finally:
            self._metrics.generating -= generating
            self._metrics.record(scope, status, time.perf_counter() - start)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
