"""Key of the user behind a request, by which a rollout gives always the same version."""

from fastapi import Request

from serving.http.requests.protocol import GenerationBody

HEADER = "X-Session-ID"


def session_key(request: Request, body: GenerationBody) -> str:
    """Return the header X-Session-ID, or what the body says of its user, or the request's id."""
    said = (body.prompt_cache_key, body.safety_identifier, body.user)
    found = next((key for key in (request.headers.get(HEADER), *said) if key), None)
    return found or request.scope["state"]["request_id"]
