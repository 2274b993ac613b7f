"""The answer to a path without a route: what to use in place of a route of vLLM, or the nearest."""

import difflib

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from serving.http.errors import ApiError

_LABELS = "models generate text only; POST /classify answers by an adapter's task head"
_NO_AUDIO = "models take no audio"
_KEPT = "the engine's memory is taken at the start and kept; stop the process to free it"
_TOKENS = "POST /tokenize returns the tokens of a prompt or of messages"
_COMPLETIONS = "POST /v1/completions takes text and token ids"
_NONE_KEPT = "no response is kept; send the whole conversation to POST /v1/responses"
_TRACES = "--otlp-traces-endpoint sends a span for each request"
_CHATS = "POST /v1/chat/completions takes messages"

# Routes of vLLM and SGLang, and what there is in place of them.
_INSTEAD = {
    "/v1/embeddings": _LABELS,
    "/pooling": _LABELS,
    "/score": _LABELS,
    "/v1/score": _LABELS,
    "/rerank": _LABELS,
    "/v1/rerank": _LABELS,
    "/v2/rerank": _LABELS,
    "/v2/embed": _LABELS,
    "/v1/audio/transcriptions": _NO_AUDIO,
    "/v1/audio/translations": _NO_AUDIO,
    "/v1/realtime": _NO_AUDIO,
    "/v1/messages": _CHATS,
    "/v1/messages/count_tokens": _TOKENS,
    "/v1/chat/completions/batch": "send a request for each conversation; they share steps",
    "/v1/chat/completions/render": _TOKENS,
    "/v1/completions/render": _TOKENS,
    "/tokenizer_info": _TOKENS,
    "/inference/v1/generate": _COMPLETIONS,
    "/generate": _COMPLETIONS,
    "/invocations": f"{_CHATS}, {_COMPLETIONS}",
    "/sleep": _KEPT,
    "/wake_up": _KEPT,
    "/is_sleeping": _KEPT,
    "/pause": "SIGTERM ends the server after the requests that run",
    "/resume": "SIGTERM ends the server after the requests that run",
    "/abort_requests": "a request ends when its client closes the connection",
    "/reset_prefix_cache": "requests with another cache_salt share no prefix",
    "/reset_mm_cache": "requests with another cache_salt share no image",
    "/start_profile": _TRACES,
    "/stop_profile": _TRACES,
    "/scale_elastic_ep": "--instances sets the number of engines at the start",
    "/redoc": "GET /docs describes the routes",
}


class Absent:
    """ASGI application of all paths that have no route; raises ApiError 404."""

    def __init__(self, app: FastAPI):
        self._app, self._no_request = app, app.router.not_found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a WebSocket is closed
            await self._no_request(scope, receive, send)
            return
        raise ApiError(404, f"Not Found: there is no such route; {self._hint(scope['path'])}.")

    def _hint(self, path: str) -> str:
        """Return what to use in place of a path; nothing of the path itself is repeated."""
        if instead := _INSTEAD.get(path.rstrip("/")):
            return instead
        if path.startswith("/v1/responses/"):
            return _NONE_KEPT
        near = difflib.get_close_matches(path[:128], self._app.openapi()["paths"], n=1, cutoff=0.7)
        if near:
            return f"the nearest is {near[0]}"
        listed = "GET /openapi.json lists" if self._app.openapi_url else "the documentation lists"
        return f"{listed} those that there are"
