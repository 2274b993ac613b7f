"""Traces of requests as OpenTelemetry spans, sent by OTLP: one span for each request that ends.

Span and attributes are vLLM's (`llm_request`, `gen_ai.*`). A thread of the exporter sends them; a
collector that does not answer costs spans, and no request anything.
"""

import importlib
import logging
import threading
import time
from typing import Any

from serving.api.request import Request
from serving.engine.metrics.histograms import FinishedRequest

logger = logging.getLogger(__name__)

SPAN = "llm_request"
_SDK = "opentelemetry.sdk.trace"
_MISSING = (
    "otlp_traces_endpoint needs OpenTelemetry, and {missing} is not installed: "
    "pip install 'lora-jax[otel]', or leave out --otlp-traces-endpoint."
)
_SCHEMES = ("http://", "https://", "grpc://", "grpcs://")
_TIMEOUT_S = 5  # of one export
_LAST_S = 3.0  # for spans that wait when the engine ends


def span_attributes(request: Request, ended: FinishedRequest, model: str) -> dict[str, Any]:
    """Return what a span says of a request; times in seconds, unknown ones are left out."""
    sampling, scheduled, first = request.sampling, ended.scheduled_s, ended.first_token_s
    attributes: dict[str, Any] = {
        "gen_ai.response.model": ended.adapter or model,
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.n": sampling.n,
        "gen_ai.usage.prompt_tokens": ended.num_prompt,
        "gen_ai.usage.completion_tokens": sum(ended.output_lengths),
        "gen_ai.response.finish_reasons": ended.reasons,
        "gen_ai.latency.e2e": ended.finished_s - ended.arrival_s,
    }
    if request.trace is not None and request.trace.http_request_id:
        attributes["http.request.id"] = request.trace.http_request_id
    if scheduled is not None:
        attributes["gen_ai.latency.time_in_queue"] = scheduled - ended.arrival_s
        attributes["gen_ai.latency.time_in_model_inference"] = ended.finished_s - scheduled
    if first is not None:
        attributes["gen_ai.latency.time_to_first_token"] = first - ended.arrival_s
        attributes["gen_ai.latency.time_in_model_decode"] = ended.finished_s - first
        if scheduled is not None:
            attributes["gen_ai.latency.time_in_model_prefill"] = first - scheduled
    return attributes


class Traces:
    """Hands spans of one engine to the exporter's thread."""

    def __init__(self, endpoint: str, model: str):
        """Raises ValueError for an endpoint that is none, or without OpenTelemetry."""
        self._model, self._told = model, False
        try:
            sdk = importlib.import_module(_SDK)
            batches = importlib.import_module(f"{_SDK}.export")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            self._api = importlib.import_module("opentelemetry.trace")
            context = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
            exporter = _exporter(endpoint)
        except ModuleNotFoundError as error:
            raise ValueError(_MISSING.format(missing=error.name)) from None
        resource = resources.Resource.create()
        if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
            resource = resource.merge(resources.Resource({"service.name": "lora-jax"}))
        self._provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(batches.BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("lora_jax.serving")
        self._propagator = context.TraceContextTextMapPropagator()

    def ended(self, request: Request, ended: FinishedRequest) -> None:
        """Hand over the span of a request that has ended; never raises."""
        try:
            self._hand_over(request, ended)
        except Exception:
            if not self._told:
                logger.exception("A request could not be traced; this is logged once.")
            self._told = True

    def close(self) -> None:
        """Send what waits and end the exporter's thread, within _LAST_S; never raises."""
        closing = threading.Thread(target=self._close, name="traces", daemon=True)
        closing.start()
        closing.join(_LAST_S)

    def _close(self) -> None:
        try:
            self._provider.shutdown()  # sends what waits first
        except Exception:
            logger.exception("The last traces could not be sent.")

    def _hand_over(self, request: Request, ended: FinishedRequest) -> None:
        trace = request.trace
        parent = self._propagator.extract({} if trace is None else dict(trace.headers))
        now_ns = time.time_ns() - round((time.monotonic() - ended.finished_s) * 1e9)
        span = self._tracer.start_span(
            SPAN,
            context=parent,
            kind=self._api.SpanKind.SERVER,
            attributes=span_attributes(request, ended, self._model),
            start_time=now_ns - round((ended.finished_s - ended.arrival_s) * 1e9),
        )
        if "error" in ended.reasons:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR))
        span.end(end_time=now_ns)


def make_traces(endpoint: str | None, model: str) -> Traces | None:
    """Return the traces that an engine's config asks for, None where it asks for none."""
    return None if endpoint is None else Traces(endpoint, model)


def _exporter(endpoint: str) -> Any:
    """Return an exporter: by HTTP for a URL that ends in /v1/traces, by gRPC for others."""
    if not endpoint.startswith(_SCHEMES):
        raise ValueError(
            f"otlp_traces_endpoint must be like grpc://localhost:4317 or "
            f"http://localhost:4318/v1/traces, got {endpoint[:200]!r}."
        )
    package = "opentelemetry.exporter.otlp.proto"
    if endpoint.rstrip("/").endswith("/v1/traces"):
        module = importlib.import_module(f"{package}.http.trace_exporter")
        return module.OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
    module = importlib.import_module(f"{package}.grpc.trace_exporter")
    insecure = endpoint.startswith(("http://", "grpc://"))
    address = endpoint.partition("://")[2]
    return module.OTLPSpanExporter(endpoint=address, insecure=insecure, timeout=_TIMEOUT_S)
