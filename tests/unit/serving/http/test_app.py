"""The whole application: routes, layers, and what a full queue does."""

import json
import re
import threading

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.http.requests.protocol import BODIES

HEADERS = {"Content-Type": "application/json"}
SGLANG = {"/load_lora_adapter", "/unload_lora_adapter"}  # their failures have another body


def test_openapi_names_every_route(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize"} <= set(paths)
    assert client.get("/redoc").status_code == 404


def test_openapi_describes_the_bodies(client):
    schema = client.get("/openapi.json").json()
    posts = [path for path, methods in schema["paths"].items() if "post" in methods]
    for path in set(posts) - {"/ping", "/v1/adapters/{name}/rollback"}:
        content = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        name = content["schema"]["$ref"].removeprefix("#/components/schemas/")
        assert schema["components"]["schemas"][name]["properties"]
    text = json.dumps(schema)
    for ref in set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', text)):
        assert ref in schema["components"]["schemas"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
FIELDS = sorted({field for body in BODIES for field in body.model_fields} - {"stream"})
POSTS = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/loras"]
POSTS += ["/v1/load_lora_adapter", "/load_lora_adapter", "/v1/unload_lora_adapter"]
POSTS += ["/unload_lora_adapter"]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(path=st.sampled_from(POSTS), body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_no_body_whatever_is_a_server_error(client, path, body):
    """The body is random, or good with some fields made random."""
    good = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [1]}
    good |= {"lora_name": "x", "lora_path": "nope", "source": {"uri": "nope"}, "max_tokens": 2}
    for given_body in (body, good | body):
        answer = client.post(path, content=json.dumps(given_body).encode(), headers=HEADERS)
        assert answer.status_code < 500, answer.text
        if answer.status_code != 200 and path not in SGLANG:
            assert answer.json()["error"]["code"] == answer.status_code
    assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200


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
        with httpx.Client(base_url=client.base_url, timeout=60) as mine:
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
