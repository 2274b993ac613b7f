"""An instance of another host than its front's answers the front alone."""

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_HEADER = b"proxy-authorization"


class FrontOnly:
    """Refuses requests, with status 407, that do not have the front's secret."""

    def __init__(self, app: ASGIApp, secret: str):
        self._app, self._wanted = app, f"Bearer {secret}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_known(scope):
            text = "This port is for the front of the cluster: send requests to its address."
            content = {"error": {"message": text, "type": "ProxyAuthenticationRequired"}}
            await JSONResponse(content, 407)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == _HEADER]
        return len(given) == 1 and hmac.compare_digest(given[0], self._wanted)
