"""Outermost layer of a request: a proxy's path, and other origins' web pages."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http.settings import HttpSettings


def at_the_edge(app: ASGIApp, settings: HttpSettings) -> ASGIApp:
    """Return the application behind the layers that the settings ask for.

    A preflight is answered here: browsers send it without a key.
    """
    if settings.cors is not None:
        cors = settings.cors
        app = CORSMiddleware(
            app,
            allow_origins=cors.origins,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            allow_credentials=cors.credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    return RootPath(app, settings.root_path) if settings.root_path else app


class RootPath:
    """Take the proxy's path off, so that every rule behind sees the routes' own paths."""

    def __init__(self, app: ASGIApp, root_path: str):
        self.app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._root or path.startswith(self._root + "/"):
            raw = scope.get("raw_path") or path.encode("utf-8", "surrogateescape")
            scope = {**scope, "path": path.removeprefix(self._root) or "/"}
            scope["raw_path"] = raw.removeprefix(self._root.encode()) or b"/"
        await self.app(scope, receive, send)
