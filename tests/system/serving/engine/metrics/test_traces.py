"""Spans say of requests what vLLM's say; trouble with a collector costs no request anything."""

import http.server
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from opentelemetry.trace import SpanKind, StatusCode
from support.doubles.otel_double import OtelDouble, Resource

from serving import Engine
from serving.api.request import Request, TraceContext
from serving.api.sampling import Sampling
from serving.engine.metrics.histograms import FinishedRequest
from serving.engine.metrics.traces import Traces, make_traces, span_attributes

MODEL = Path(__file__).parents[5] / "assets" / "tiny-moe"
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
        Engine(MODEL, otlp_traces_endpoint="grpc://localhost:4317")
    assert make_traces(None, "base") is None


@pytest.fixture
def otel(monkeypatch):
    """A double of the SDK, which only the extra brings."""
    double = OtelDouble()
    for name, module in double.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return double


def test_a_request_s_span_is_below_the_caller_s_and_has_its_times(otel, monkeypatch):
    clock = SimpleNamespace(time_ns=lambda: 1_700_000_000_000_000_000, monotonic=lambda: 10.0)
    monkeypatch.setattr("serving.engine.metrics.traces.time", clock)
    traces = make_traces("grpc://collector:4317", "base")
    times = {"arrival_s": 7.0, "finished_s": 9.0}
    traces.ended(request_of(trace=TraceContext(PARENT)), ended(**times))
    traces.ended(request_of(), ended(reasons=("stop", "error"), **times))
    below, alone = otel.spans
    assert (below.name, below.kind) == ("llm_request", SpanKind.SERVER)
    assert f"{below.parent.trace_id:032x}" == TRACE
    assert f"{below.parent.span_id:016x}" == "b7ad6b7169203331"
    assert not alone.parent.is_valid
    for span in otel.spans:
        assert span.start_time == 1_699_999_997_000_000_000
        assert span.end_time == 1_699_999_999_000_000_000
    assert below.attributes == span_attributes(request_of(), ended(**times), "base")
    assert below.status is None
    assert alone.status.status_code is StatusCode.ERROR
    traces.close()
    assert otel.is_shut_down  # which sends what waits


@pytest.mark.parametrize(
    ("endpoint", "exporter"),
    [
        ("http://c:4318/v1/traces", {"protocol": "http", "endpoint": "http://c:4318/v1/traces"}),
        ("grpc://c:4317", {"protocol": "grpc", "endpoint": "c:4317", "insecure": True}),
        ("https://c:4317", {"protocol": "grpc", "endpoint": "c:4317", "insecure": False}),
    ],
)
def test_the_endpoint_says_which_protocol_is_spoken(otel, endpoint, exporter):
    Traces(endpoint, "base").close()
    (made,) = otel.exporters
    assert made.pop("timeout") > 0
    assert made == exporter


def test_the_service_has_the_operator_s_name_or_this_project_s(otel, monkeypatch):
    Traces("grpc://c:4317", "base").close()
    assert otel.resource.attributes["service.name"] == "lora-jax"
    assert otel.resource.attributes["telemetry.sdk.language"] == "python"
    monkeypatch.setattr(Resource, "service", "of-the-operator")
    Traces("grpc://c:4317", "base").close()
    assert otel.resource.attributes["service.name"] == "of-the-operator"


def test_a_request_that_cannot_be_traced_ends_as_others_and_is_logged_once(otel, caplog):
    traces = Traces("grpc://c:4317", "base")
    broken = TraceContext((("traceparent", 3),))  # no text, as headers are
    for _ in range(3):
        traces.ended(request_of(trace=broken), ended())
    assert caplog.text.count("A request could not be traced") == 1
    traces.ended(request_of(), ended())
    assert len(otel.spans) == 1


def test_an_exporter_that_fails_or_hangs_at_the_end_does_not_keep_the_engine(
    otel, caplog, monkeypatch
):
    def fail():
        raise OSError("no collector")

    monkeypatch.setattr(otel, "shut_down", fail)
    Traces("grpc://c:4317", "base").close()
    assert "The last traces could not be sent." in caplog.text
    hung = threading.Event()
    monkeypatch.setattr(otel, "shut_down", lambda: hung.wait(60))
    monkeypatch.setattr("serving.engine.metrics.traces._LAST_S", 0.05)
    began, before = time.monotonic(), {*threading.enumerate()}
    try:
        Traces("grpc://c:4317", "base").close()
        assert time.monotonic() - began < 30
        (closing,) = (t for t in {*threading.enumerate()} - before if t.name == "traces")
    finally:
        hung.set()
    closing.join(60)
    assert not closing.is_alive()


def test_an_endpoint_of_another_scheme_is_refused(otel):
    with pytest.raises(ValueError, match=r"must be like grpc://localhost:4317 .* got 'localhost'"):
        Traces("localhost", "base")
    assert not otel.exporters


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
