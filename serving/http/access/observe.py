"""Around every request: its id in the answer, counts and durations with bounded labels, a line in
the access log, and one in the audit log if it is refused.
"""

import logging
import re
import secrets
import time
from typing import Any, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import get_client_addr, get_path_with_query_string

from serving.http.access.audit import AuditLog

access_logger = logging.getLogger("serving.access")

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
UNCOUNTED = frozenset(
    {"/metrics", "/metrics/", "/health", "/live", "/ready", "/load", "/ping", "/version"}
)
STREAMING = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
GENERATING = STREAMING | {"/classify"}
REQUEST_ID_HEADER = b"x-request-id"
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class HttpMetrics:
    """Counters of one server, with the names of prometheus-fastapi-instrumentator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)  # process_* and python_*
        self.requests = Counter(
            "http_requests",
            "Requests by route, method and class of status code.",
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
        self.failed_keys = Counter(
            "lora_jax:failed_keys", "Requests with a wrong key.", ("why",), registry=self.registry
        )
        for why in ("unknown", "early", "expired"):
            self.failed_keys.labels(why)
        self.generating = 0  # requests for text in flight

    def failed_keys_text(self) -> str:
        """Return the exposition text of the wrong keys alone."""
        names = [sample.name for f in self.failed_keys.collect() for sample in f.samples]
        return generate_latest(self.registry.restricted_registry(names)).decode()

    def forget_requests(self) -> None:
        """Count answers from zero again."""
        self.requests.clear()
        self.seconds.clear()

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

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        audit: AuditLog | None = None,
        access_log: bool = False,
    ):
        self.app = app
        self._metrics, self._audit, self._access_log = metrics, audit or AuditLog(), access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        others = [header for header in scope["headers"] if header[0] != REQUEST_ID_HEADER]
        scope["headers"] = [*others, (REQUEST_ID_HEADER, request_id.encode())]  # for an instance

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                scope["state"]["version"] = headers.get("X-Adapter-Version")  # an instance's, too
            await send(message)

        generating = scope["path"] in GENERATING
        self._metrics.generating += generating
        try:
            await self.app(scope, receive, watched)
        finally:
            self._metrics.generating -= generating
            seconds = time.perf_counter() - start
            self._metrics.record(scope, status, seconds)
            self._tell(scope, status, seconds)

    def _tell(self, scope: Scope, status: int, seconds: float) -> None:
        """Write the request to the access log, and a refusal to the audit log."""
        state = scope["state"]
        key = getattr(state.get("caller"), "id", "")
        if self._access_log:
            access_logger.info(
                '%s - "%s %s HTTP/%s" %d key=%s adapter=%s version=%s id=%s %.3fs',
                get_client_addr(cast(Any, scope)),
                scope["method"],
                get_path_with_query_string(cast(Any, scope)),
                scope["http_version"],
                status,
                key or "-",
                state.get("adapter") or "-",
                (state.get("version") or "-").replace(" ", ""),
                state["request_id"],
                seconds,
            )
        if status in (401, 403, 429):
            why = state.get("failed_key", "")
            self._audit.refusal(
                "failed key" if why else "refused",
                key=key,
                status=status,
                adapter=state.get("adapter"),
                request_id=state["request_id"],
                detail=why or f"{scope['method']} {scope['path'][:200]}",
            )


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
