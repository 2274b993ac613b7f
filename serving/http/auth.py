"""Authentication in front of every route: whatever is not named here needs an API key."""

import math

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http.errors import ApiError
from serving.http.keys import Caller, KeyRing

METRICS_PATHS = ("/metrics", "/metrics/")


class Authenticate:
    """Put the caller into the request's state, or answer 401, 403 or 429.

    /health is open to everybody, and so are the demo page and /docs (they hold no data) where the
    page is served; /metrics is open unless there is a key for it.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, demo: bool = False):
        self.app = app
        self._keys = keys
        self._open_paths = ("/health", "/", "/docs") if demo else ("/health",)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            scope.setdefault("state", {})["caller"] = self._admit(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _admit(self, scope: Scope) -> Caller:
        path = scope["path"]
        caller = self._caller(scope)
        open_metrics = path in METRICS_PATHS and self._keys.anonymous.reads_metrics
        if path in self._open_paths or open_metrics:
            return caller or self._keys.anonymous
        if caller is None:
            raise _unauthorized("The API key is wrong.")
        if not (caller.reads_metrics if path in METRICS_PATHS else caller.uses_model):
            if caller is self._keys.anonymous:
                raise _unauthorized("An API key is needed: Authorization: Bearer KEY.")
            raise ApiError(403, "This key is not for this route.")
        wait_s = caller.bucket.wait_s() if caller.bucket else 0.0
        if wait_s:
            raise ApiError(
                429,
                "Too many requests with this key.",
                headers={"Retry-After": str(math.ceil(wait_s))},
            )
        return caller

    def _caller(self, scope: Scope) -> Caller | None:
        """Return who the key belongs to, the anonymous caller without key, None if it is wrong."""
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return self._keys.anonymous
        found = self._keys.find(key.strip())
        if found is None and self._keys.anonymous.uses_model:
            return self._keys.anonymous  # clients send a placeholder to a server without keys
        return found


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})


def caller_of(request: Request) -> Caller:
    """Return who sent this request."""
    return request.scope["state"]["caller"]


def require_admin(request: Request) -> None:
    """Refuse with 403 unless the caller may change what the server holds."""
    if not caller_of(request).is_admin:
        raise ApiError(403, "This route needs the admin key.")
