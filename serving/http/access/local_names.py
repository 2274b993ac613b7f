"""A server without a key answers only to who calls it by this machine's own name.

Any web page may point a name of its own at 127.0.0.1 and then read what such a server answers (DNS
rebinding). The browser still sends that name as Host.
"""

import ipaddress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http.errors import ApiError


class LocalNames:
    """Answer 403 to requests for another host than localhost or an address."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = "" if scope["type"] == "lifespan" else Headers(scope=scope).get("host", "")
        if is_local_name(name):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            403,
            f"This server has no API key, so it answers to localhost only, not to {name[:64]!r}. "
            "Start it with --api-key, or with --insecure if that is what you want.",
        )
        await error.response()(scope, receive, send)


def is_local_name(host: str) -> bool:
    """Return whether a Host header is empty, localhost or an address, with or without a port."""
    bracket, closed, _ = host.removeprefix("[").partition("]")
    name = bracket if closed else host.partition(":")[0]
    if name.lower() in ("", "localhost") or name.lower().endswith(".localhost"):
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False
