"""The whole application: routes, layers, and what a full queue does."""

import threading

import httpx


def test_openapi_names_every_route(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"} <= set(paths)
    assert client.get("/docs").status_code == client.get("/redoc").status_code == 404


def test_queue_full_is_429_with_retry_after_and_then_works(client, engine):
    engine.open.clear()
    engine.queue_limit = 1
    body = {"prompt": "hi"}
    try:
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as first:
            for stream in (False, True):
                refused = client.post("/v1/completions", json=body | {"stream": stream})
                assert refused.status_code == 429
                assert refused.headers["retry-after"] == "2"
                assert refused.json()["error"]["type"] == "RateLimitError"
            engine.open.set()
            first.read()
        assert client.post("/v1/completions", json=body).status_code == 200
    finally:
        engine.open.set()
        engine.queue_limit = 10_000


def test_many_clients_get_their_own_answers(client):
    alone = {
        name: client.post("/v1/completions", json={"prompt": "hi", "model": name}).json()
        for name in ("sql", "law", "fake-base")
    }
    wrong = []

    def ask(name: str) -> None:
        with httpx.Client(base_url=client.base_url) as mine:
            for _ in range(5):
                answer = mine.post("/v1/completions", json={"prompt": "hi", "model": name}).json()
                if answer["choices"] != alone[name]["choices"]:
                    wrong.append(answer)

    threads = [threading.Thread(target=ask, args=(name,)) for name in alone for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
