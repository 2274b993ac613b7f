"""GET /: one page that compares the base model with an adapter, side by side."""

import base64
import hashlib
import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

router = APIRouter()
PAGE = Path(__file__).parent / "page" / "index.html"


@router.get("/", include_in_schema=False)
def page() -> Response:
    """Return the page; its policy lets nothing run but its own script, and nothing load."""
    html = PAGE.read_text()
    headers = {"Content-Security-Policy": policy(html), "X-Content-Type-Options": "nosniff"}
    headers |= {"Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
    return Response(html, media_type="text/html; charset=utf-8", headers=headers)


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
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
