"""GET /: one page that asks the base model and several adapters the same, side by side."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from serving.api.examples import BASE, Examples
from serving.http.access.auth import caller_of
from serving.http.server import server_of

router = APIRouter()
PAGE = Path(__file__).parent / "page" / "index.html"


@router.get("/", include_in_schema=False)
def page() -> Response:
    """Return the page; nothing runs but its own script, and images are those it holds itself."""
    html = PAGE.read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": policy(html), "X-Content-Type-Options": "nosniff"}
    headers |= {"Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


@router.get("/demo/facts", include_in_schema=False)
async def facts(request: Request) -> dict[str, Any]:
    """Return whether the model chats and sees, and examples for the base and the caller's adapters.

    Images of examples are data URLs, by the adapter's name; the base's name among them is "".
    """
    server, caller = server_of(request), caller_of(request)
    examples: Examples = request.app.state.examples
    chats = bool(server.engine.tokenizer.has_chat_template)
    sees = chats and server.engine.images is not None
    shown = [name for name in examples.images if sees and (name == BASE or caller.may_use(name))]
    return {
        "chats": chats,
        "sees": sees,
        "docs": server.settings.docs,
        "prompt": examples.base,
        "adapters": {k: v for k, v in examples.adapters.items() if caller.may_use(k)},
        "images": {n: [_data_url(file) for file in examples.images[n]] for n in shown},
    }


def _data_url(file: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"


def policy(html: str) -> str:
    """Return the Content-Security-Policy that fits the page's own script and style, by hash."""
    hashes = {
        tag: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
            for text in re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        )
        for tag in ("script", "style")
    }
    return (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
