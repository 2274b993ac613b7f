"""Trace of a request's caller: W3C's headers, which make the engine's span part of it."""

from fastapi import Request

from serving.api.request import TraceContext
from serving.http.interface import AbstractEngine

_MOST = {"traceparent": 128, "tracestate": 1024}  # characters; W3C has 55 and 512


def trace_of(request: Request, engine: AbstractEngine) -> TraceContext | None:
    """Return the caller's trace and request id; None where the engine sends no traces."""
    if engine.config.otlp_traces_endpoint is None:
        return None
    pairs = ((name, request.headers.get(name, "")) for name in _MOST)
    headers = tuple((name, value) for name, value in pairs if 0 < len(value) <= _MOST[name])
    return TraceContext(headers, request.state.request_id)
