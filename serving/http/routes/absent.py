"""The answer to a path without a route: what replaces another server's route, or the nearest."""

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

_GENERATE = (
    'send {"model": ADAPTER, "prompt": TEXT, "max_tokens": N} to POST /v1/completions; '
    '"stream": true streams'
)
_PROBES = "GET /health tells whether the engine works, GET /ready whether requests are taken"
_FACTS = "GET /v1/models lists base and adapters, GET /server_info the settings"
_DRAIN = "SIGTERM ends the server after the requests that run"
_CLOSES = "a request ends when its client closes the connection"
_PREFIX = "requests with another cache_salt share no prefix"
_ADAPTERS_ONLY = "base weights are those of the start; POST /v1/load_lora_adapter loads adapters"
_IN_CHATS = "answers of /v1/chat/completions have them where the server has its parser's flag"

# Routes of vLLM, SGLang and LoRAX, and what there is in place of them.
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
    "/generate": _GENERATE,
    "/generate_stream": _GENERATE,
    "/": "POST /v1/completions answers prompts, GET /docs describes the routes, --demo serves a "
    "page",
    "/api/generate": _GENERATE,
    "/vertex_generate": _GENERATE,
    "/api/chat": _CHATS,
    "/classify_batch": "POST /classify takes a list of texts as input",
    "/encode": _LABELS,
    "/embed": _LABELS,
    "/health_generate": _PROBES,
    "/startup": _PROBES,
    "/get_model_info": _FACTS,
    "/model_info": _FACTS,
    "/info": _FACTS,
    "/get_server_info": "GET /server_info has the settings",
    "/get_load": "GET /load counts requests, GET /metrics has more",
    "/v1/loads": "GET /load counts requests, GET /metrics has more",
    "/flush_cache": _PREFIX,
    "/abort_request": _CLOSES,
    "/pause_generation": _DRAIN,
    "/continue_generation": _DRAIN,
    "/release_memory_occupation": _KEPT,
    "/resume_memory_occupation": _KEPT,
    "/load_lora_adapter_from_tensors": "write the adapter below --lora-dir, then POST "
    "/load_lora_adapter",
    "/update_weights_from_disk": _ADAPTERS_ONLY,
    "/update_weights_from_tensor": _ADAPTERS_ONLY,
    "/update_weights_from_distributed": _ADAPTERS_ONLY,
    "/open_session": "the prefix cache keeps what requests of one conversation share",
    "/close_session": "the prefix cache keeps what requests of one conversation share",
    "/parse_function_call": _IN_CHATS,
    "/separate_reasoning": _IN_CHATS,
    "/invocations": f"{_CHATS}, {_COMPLETIONS}",
    "/sleep": _KEPT,
    "/wake_up": _KEPT,
    "/is_sleeping": _KEPT,
    "/pause": _DRAIN,
    "/resume": _DRAIN,
    "/abort_requests": _CLOSES,
    "/reset_prefix_cache": _PREFIX,
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
        if instead := _INSTEAD.get(path.rstrip("/") or "/"):
            return instead
        if path.startswith("/v1/responses/"):
            return _NONE_KEPT
        near = difflib.get_close_matches(path[:128], self._app.openapi()["paths"], n=1, cutoff=0.7)
        if near:
            return f"the nearest is {near[0]}"
        listed = "GET /openapi.json lists" if self._app.openapi_url else "the documentation lists"
        return f"{listed} those that there are"
