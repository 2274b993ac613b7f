"""Metrics at a port of their own: nothing else is there."""

import socket

import httpx
from prometheus_client import CollectorRegistry, Counter

from serving.http.wire import metrics_app
from serving.http.wire.metrics_app import serve_metrics


def test_metrics_of_all_registries_and_nothing_else():
    registries = [CollectorRegistry(), CollectorRegistry()]
    for name, registry in zip(("one", "two"), registries, strict=True):
        Counter(name, "A number.", registry=registry).inc()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with serve_metrics(sock, registries), httpx.Client(timeout=60) as client:
            answer = client.get(f"{url}/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "one_total 1.0" in answer.text
            assert "two_total 1.0" in answer.text
            assert client.get(f"{url}/v1/models").status_code == 404
            assert client.post(f"{url}/metrics").status_code == 404


def test_a_caller_that_comes_at_once_is_not_refused(monkeypatch):
    """Before: until the server's thread had begun, the port refused connections."""
    monkeypatch.setattr(metrics_app.uvicorn.Server, "run", lambda server, sockets: None)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        with serve_metrics(sock, []), socket.create_connection(sock.getsockname(), timeout=60):
            pass
