"""The caller's trace goes to the engine where spans are sent, and nowhere else."""

import dataclasses

import pytest

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROUTES = {
    "/v1/completions": {"prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    "/v1/responses": {"input": "x", "max_output_tokens": 1},
}


@pytest.fixture
def tracing(engine, monkeypatch):
    config = dataclasses.replace(engine.config, otlp_traces_endpoint="grpc://localhost:4317")
    monkeypatch.setattr(engine, "config", config)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.usefixtures("tracing")
def test_headers_and_id_go_with_the_request(client, engine, route):
    headers = {"traceparent": PARENT, "tracestate": "a=1", "X-Request-Id": "mine"}
    assert client.post(route, json=ROUTES[route], headers=headers).status_code == 200
    trace = engine.submitted[-1].trace
    assert trace.headers == (("traceparent", PARENT), ("tracestate", "a=1"))
    assert trace.http_request_id == "mine"


@pytest.mark.usefixtures("tracing")
def test_headers_that_are_too_long_are_left_out(client, engine):
    headers = {"traceparent": "0" * 129, "tracestate": "a" * 1025}
    assert client.post(
        "/v1/completions", json=ROUTES["/v1/completions"], headers=headers
    ).is_success
    assert engine.submitted[-1].trace.headers == ()


def test_without_an_endpoint_there_is_no_trace(client, engine):
    headers = {"traceparent": PARENT}
    assert client.post(
        "/v1/completions", json=ROUTES["/v1/completions"], headers=headers
    ).is_success
    assert engine.submitted[-1].trace is None
