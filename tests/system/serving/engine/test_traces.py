"""Spans say of requests what vLLM's say; trouble with a collector costs no request anything."""

import http.server
import sys
import threading
import time

import pytest

from serving import Engine
from serving.api.request import Request, TraceContext
from serving.api.sampling import Sampling
from serving.engine.histograms import FinishedRequest
from serving.engine.traces import Traces, make_traces, span_attributes

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = (("traceparent", f"00-{TRACE}-b7ad6b7169203331-01"),)


def request_of(**fields):
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=7, n=2)
    times = {"arrival_s": 1.0, "deadline_s": 60.0}
    return Request("id", (1, 2), sampling, "law", "", print, **times, **fields)


def ended(**fields):
    times = {"arrival_s": 1.0, "scheduled_s": 1.5, "first_token_s": 2.0, "finished_s": 4.0}
    counts = {"num_prompt": 2, "num_cached": 0, "output_lengths": (3, 4), "max_tokens": 7}
    given = {"adapter": "law", "reasons": ("stop", "length"), "preemptions": 0, **times, **counts}
    return FinishedRequest(**{**given, **fields})


def test_a_span_says_what_vllm_s_do():
    trace = TraceContext(PARENT, "from-the-client")
    assert span_attributes(request_of(trace=trace), ended(), "base") == {
        "gen_ai.response.model": "law",
        "gen_ai.request.id": "id",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.completion_tokens": 7,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.latency.e2e": 3.0,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_inference": 2.5,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "http.request.id": "from-the-client",
    }


def test_times_that_never_came_are_left_out():
    told = span_attributes(request_of(), ended(scheduled_s=None, first_token_s=None), "base")
    assert [name for name in told if "latency" in name] == ["gen_ai.latency.e2e"]


def test_without_the_extra_the_engine_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ValueError, match=r"pip install 'lora-jax\[otel\]'"):
        Engine("some/model", otlp_traces_endpoint="grpc://localhost:4317")
    assert make_traces(None, "base") is None


class Collector(http.server.BaseHTTPRequestHandler):
    """Keeps the bodies that it is sent."""

    def do_POST(self):
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        """Say nothing."""


def test_spans_reach_a_collector_below_the_caller_s():
    pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")
    proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    server.bodies = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    traces = Traces(f"http://127.0.0.1:{server.server_port}/v1/traces", "base")
    now = time.monotonic()
    failed = {"reasons": ("error",), "arrival_s": now - 3, "finished_s": now}
    traces.ended(request_of(trace=TraceContext(PARENT)), ended(**failed))
    traces.close()
    server.shutdown()
    thread.join()
    server.server_close()
    (body,) = server.bodies
    asked = proto.ExportTraceServiceRequest.FromString(body)
    (span,) = asked.resource_spans[0].scope_spans[0].spans
    assert (span.name, span.trace_id.hex()) == ("llm_request", TRACE)
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(3.0)
    assert abs(span.end_time_unix_nano / 1e9 - time.time()) < 60
    assert span.status.code == span.status.STATUS_CODE_ERROR
    service = {a.key: a.value.string_value for a in asked.resource_spans[0].resource.attributes}
    assert service["service.name"] == "lora-jax"


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9/v1/traces", "grpc://127.0.0.1:9"])
def test_a_collector_that_is_not_there_holds_nothing_up(endpoint):
    pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")
    traces, began = Traces(endpoint, "base"), time.monotonic()
    for _ in range(5000):  # more than wait at a time
        traces.ended(request_of(), ended())
    assert time.monotonic() - began < 10
    traces.close()  # returns though nobody takes what waits


def test_an_endpoint_that_is_none_is_refused():
    pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")
    with pytest.raises(ValueError, match="must be like grpc://localhost:4317"):
        Traces("localhost", "base")
