"""Target of a request for text, and the key of its user, whom a rollout gives one version."""

from fastapi import Request

from serving.http.access.keys import Caller
from serving.http.requests.model_names import ModelNames, Target
from serving.http.requests.protocol import ClassifyBody, GenerationBody

HEADER = "X-Session-ID"


def session_key(request: Request, body: GenerationBody | ClassifyBody) -> str:
    """Return the header X-Session-ID, or what the body says of its user, or the request's id."""
    body_keys = (body.prompt_cache_key, body.safety_identifier, body.user)
    chosen = next((key for key in (request.headers.get(HEADER), *body_keys) if key), None)
    return chosen or request.scope["state"]["request_id"]


async def target_of(
    names: ModelNames, request: Request, body: GenerationBody | ClassifyBody, caller: Caller
) -> Target:
    """Return the base model, the adapter or the sum of adapters that a body asks for."""
    key, is_gone = session_key(request, body), request.is_disconnected
    if body.adapters is None:
        return await names.resolve(body.model, body.lora_path, caller, key, is_gone=is_gone)
    given = body.adapters, body.model, body.lora_path
    return await names.resolve_sum(*given, caller, key, is_gone=is_gone)
