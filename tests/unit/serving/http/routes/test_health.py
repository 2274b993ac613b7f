"""Health follows the engine; metrics are plain text without a redirect; small answers."""


def test_health_is_empty_and_503_when_the_engine_is_dead(client, engine):
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = client.request(method, path)
        assert (answer.status_code, answer.content) == (200, b"")
    engine.alive = False
    try:
        for path in ("/health", "/ping"):
            answer = client.get(path)
            assert (answer.status_code, answer.content) == (503, b"")
    finally:
        engine.alive = True
    assert client.get("/health").status_code == 200


def test_metrics_are_plain_text_with_and_without_slash(client):
    client.post("/v1/completions", json={"prompt": "hi"})
    for path in ("/metrics", "/metrics/"):
        answer = client.get(path, follow_redirects=False)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "http_requests_total{" in answer.text


def test_load_counts_requests_for_text_in_flight(client, engine):
    assert client.get("/load").json() == {"server_load": 0}
    engine.open.clear()
    try:
        body = {"prompt": "hi", "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert client.get("/load").json() == {"server_load": 1}
            engine.open.set()
            answer.read()
    finally:
        engine.open.set()
    assert client.get("/load").json() == {"server_load": 0}


def test_version_and_server_info_name_no_path(client):
    assert client.get("/version").json()["version"]
    answer = client.get("/server_info")
    info = answer.json()
    assert info["model"] == "fake-base"
    assert info["config"]["max_model_len"] == 64
    assert info["state"] == {"running": 0, "waiting": 0}
    assert info["implementations"] == {}  # a fake engine has traced no op
    assert "/" not in answer.text


def test_metrics_tell_of_the_process(client):
    text = client.get("/metrics").text
    for name in ("process_resident_memory_bytes", "process_open_fds", "python_info"):
        assert f"\n{name}" in text
