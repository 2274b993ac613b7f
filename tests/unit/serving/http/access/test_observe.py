"""Request ids are echoed and name nothing; labels never come from the client."""

import asyncio
import re
import socket

import pytest
from prometheus_client import generate_latest
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import client_of

from serving.http.access.observe import HttpMetrics, Observe
from serving.http.app import create_app
from serving.http.settings import HttpSettings, Tenant


def counts(client) -> list[str]:
    lines = client.get("/metrics").text.splitlines()
    return [line for line in lines if line.startswith("http_requests_total{")]


def test_the_client_s_id_names_the_answer_but_is_not_used_inside(client, engine):
    headers = {"X-Request-Id": "my-id-1"}
    body = {"prompt": "hi", "request_id": "my-id-2"}
    answers = [client.post("/v1/completions", json=body, headers=headers) for _ in range(2)]
    assert [a.headers["x-request-id"] for a in answers] == ["my-id-1"] * 2
    inside = [given.id for given in engine.submitted[-2:]]
    assert len(set(inside)) == 2
    assert not any("my-id" in name for name in inside)
    assert [a.json()["id"] for a in answers] == ["cmpl-my-id-2"] * 2
    for given in (None, "not plain", "x" * 129):
        body["request_id"] = given
        answer = client.post("/v1/completions", json=body, headers=headers).json()
        assert answer["id"] == "cmpl-my-id-1"
    answer = client.post("/v1/completions", json={"prompt": "hi"})
    assert answer.json()["id"] == "cmpl-" + answer.headers["x-request-id"]


def test_ids_that_are_not_plain_are_replaced(client):
    for bad in ("", "a b", "x" * 129, "\xe9"):
        answer = client.get("/health", headers=[(b"X-Request-Id", bad.encode("latin-1"))])
        assert len(answer.headers["x-request-id"]) == 32
    one, two = (client.get("/health").headers["x-request-id"] for _ in range(2))
    assert one != two


def test_labels_are_templates_known_methods_and_classes(client):
    for i in range(5):
        client.get(f"/v1/models/name-{i}")
        client.get(f"/made/up/{i}")
        client.request("PURGE", "/v1/models")
        client.request(f"MADEUP{i}", "/v1/models")
    lines = counts(client)
    assert not any("name-" in x or "made" in x.lower() or "PURGE" in x for x in lines)
    assert any('handler="/v1/models/{model:path}",method="GET",status="4xx"' in x for x in lines)
    assert any('handler="none",method="GET",status="4xx"' in x for x in lines)
    assert any('method="other"' in x for x in lines)


def test_probes_are_not_counted(client):
    before = counts(client)
    for path in ("/metrics", "/health", "/load", "/ping", "/version"):
        client.get(path)
    assert counts(client) == before


def test_durations_are_recorded(client):
    client.post("/v1/completions", json={"prompt": "hi"})
    text = client.get("/metrics").text
    assert 'http_request_duration_seconds_count{handler="/v1/completions",method="POST"}' in text


def test_a_broken_request_line_is_not_a_label(client):
    url = client.base_url
    with socket.create_connection((url.host, url.port), timeout=60) as sock:
        sock.sendall(b"G\xffT / HTTP/1.1\r\n\r\n")
        assert b" 400 " in sock.recv(4096)
    assert client.get("/health").status_code == 200


def test_servers_do_not_share_counters():
    one, two = HttpMetrics(), HttpMetrics()
    one.record({"method": "GET", "type": "http"}, 200, 0.1)
    assert b'status="2xx"' in generate_latest(one.registry)
    assert b'status="2xx"' not in generate_latest(two.registry)


def test_the_access_log_names_key_and_adapter_and_no_secret(lora_dir, caplog):
    settings = HttpSettings(tenants=(Tenant("secret-1", id="team-a"),), access_log=True)
    app = create_app(FakeEngine(lora_dir), settings)
    with caplog.at_level("INFO", "serving.access"), client_of(app) as client:
        headers = {"Authorization": "Bearer secret-1", "X-Request-Id": "id-7"}
        body = {"prompt": "hi", "model": "sql"}
        client.post("/v1/completions?x=%0ay", json=body, headers=headers)
        client.get("/v1/models")
    records = [record for record in caplog.records if record.name == "serving.access"]
    first, second = [record.getMessage() for record in records]
    line = r'127\.0\.0\.1:\d+ - "POST /v1/completions\?x=%0ay HTTP/1\.1" 200 key=team-a '
    assert re.fullmatch(line + r"adapter=sql version=- id=id-7 \d+\.\d{3}s", first), first
    assert " 401 key=- adapter=- version=- " in second
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("version", "shown"), [("sql@v2", "sql@v2"), ("sql@v2, formal@v1", "sql@v2,formal@v1")]
)
def test_the_access_log_names_the_version_that_answered(version, shown, caplog):
    """The front of a cluster knows it from an instance's answer alone."""

    async def app(scope, receive, send):
        scope["state"]["adapter"] = "sql"
        headers = [(b"x-adapter-version", version.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    async def nothing(*message):
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    scope |= {"http_version": "1.1", "query_string": b""}
    with caplog.at_level("INFO", "serving.access"):
        asyncio.run(Observe(app, HttpMetrics(), access_log=True)(scope, nothing, nothing))
    (line,) = [r.getMessage() for r in caplog.records if r.name == "serving.access"]
    assert f" adapter=sql version={shown} id=" in line
