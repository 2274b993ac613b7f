"""The front over small applications on Unix sockets: who is asked what, and what comes of it."""

import asyncio
import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
import uvicorn
from http_server import serve_app

from serving.cluster import proxy
from serving.cluster.proxy import Proxy
from serving.cluster.router import Router
from serving.http.uvicorn_server import uvicorn_config


class Instance:
    """An application that notes what it is asked; `fail` is a status for what changes adapters."""

    def __init__(self, number):
        self.number, self.asked, self.fail, self.gone = number, [], None, threading.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        body = (await receive()).get("body", b"")
        self.asked.append((scope["method"], scope["path"], scope["query_string"], body))
        if scope["path"] == "/endless":
            await self._endless(receive, send)
            return
        status = self.fail if self.fail and "adapter" in scope["path"] else 200
        text = json.dumps({"instance": self.number, "path": scope["path"]}).encode()
        if scope["path"] == "/metrics":
            text = b"# TYPE up gauge\nup 1.0\n"
        headers = [(b"content-length", str(len(text)).encode()), (b"x-number", b"%d" % self.number)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})

    async def _endless(self, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        watch = asyncio.ensure_future(receive())
        while not watch.done():
            await send({"type": "http.response.body", "body": b"more\n", "more_body": True})
            await asyncio.sleep(0.01)
        assert watch.result()["type"] == "http.disconnect"
        self.gone.set()


@contextlib.contextmanager
def listening(app, path):
    """The app on a Unix socket, as an instance serves."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        server = uvicorn.Server(uvicorn_config(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def instances():
    return [Instance(0), Instance(1)]


@pytest.fixture
def router():
    return Router(2, ["a", "b"])


@pytest.fixture
def client(instances, router, tmp_path):
    paths = [tmp_path / f"i{n}" for n in range(2)]
    with contextlib.ExitStack() as stack:
        for app, path in zip(instances, paths, strict=True):
            stack.enter_context(listening(app, path))
        url = stack.enter_context(serve_app(Proxy([str(p) for p in paths], router, ["base"])))
        yield stack.enter_context(httpx.Client(base_url=url, timeout=30))


def test_an_adapter_is_answered_by_its_own_instance(client, router, instances):
    for name, home in router.instance_of.items():
        for _ in range(3):
            answer = client.post("/v1/completions?x=1", json={"model": name, "max_tokens": 3})
            assert answer.json()["instance"] == home
            assert answer.headers["x-number"] == str(home)
    method, path, query, body = instances[0].asked[0]
    assert (method, path, query) == ("POST", "/v1/completions", b"x=1")
    assert json.loads(body)["max_tokens"] == 3


def test_nothing_is_under_way_when_all_is_answered(client, router):
    for body in ({"model": "base"}, {"model": "a"}, {}, {"model": 5, "max_tokens": "x"}):
        assert client.post("/v1/completions", json=body).status_code == 200
    assert client.post("/v1/completions", content=b"{not json").status_code == 200
    assert client.get("/v1/models").json()["path"] == "/v1/models"

    def all_is_over():  # a client has its answer a moment before the front has let go of it
        chosen = [router.choose(None) for _ in range(2)]
        for instance in chosen:
            router.done(instance)
        return chosen == [0, 1]

    end = time.monotonic() + 20
    while not all_is_over():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/unload_lora_adapter"),
        ("DELETE", "/v1/loras/adapter"),
    ],
)
def test_what_changes_adapters_goes_to_all(client, instances, method, path):
    assert client.request(method, path).status_code == 200
    assert [len(instance.asked) for instance in instances] == [1, 1]
    instances[1].fail = 409
    answer = client.request(method, path)
    assert (answer.status_code, answer.json()["instance"]) == (409, 1)


def test_metrics_of_all(client):
    assert client.get("/metrics").text.splitlines()[-2:] == [
        'up{instance="0"} 1.0',
        'up{instance="1"} 1.0',
    ]


def test_a_client_that_goes_ends_its_request_at_the_instance(client, router, instances):
    with client.stream("GET", "/endless") as answer:
        assert next(answer.iter_lines()) == "more"
    assert instances[0].gone.wait(30)
    for _ in range(3000):
        if router._under_way == [0, 0]:
            return
        time.sleep(0.01)
    raise AssertionError("the request still counts")


def test_a_body_that_is_too_long_is_refused(client, instances):
    assert client.post("/v1/completions", content=b"x" * (17 << 20)).status_code == 413
    assert not instances[0].asked


def test_a_body_that_does_not_come_is_408(monkeypatch, client, instances):
    monkeypatch.setattr(proxy, "_BODY_S", 0.2)
    asked = sum(len(instance.asked) for instance in instances)
    with socket.create_connection((client.base_url.host, client.base_url.port), 30) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        sock.sendall(head)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 408 ")
    assert sum(len(instance.asked) for instance in instances) == asked


def test_another_instance_answers_for_one_that_is_down(instances, tmp_path):
    router = Router(2, ["a", "b"])
    home = router.instance_of["a"]
    paths = [str(tmp_path / f"i{n}") for n in range(2)]
    with (
        listening(instances[1 - home], paths[1 - home]),
        serve_app(Proxy(paths, router, ["base"])) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        answer = client.post("/v1/completions", json={"model": "a"})
        assert answer.json()["instance"] == 1 - home
        assert router.up == (1 - home,)
        assert client.post("/v1/loras", json={}).status_code == 200


def test_nobody_is_there(tmp_path):
    paths = [str(tmp_path / f"i{n}") for n in range(2)]
    with (
        serve_app(Proxy(paths, Router(2), ["base"])) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        for method, path in (
            ("POST", "/v1/completions"),
            ("POST", "/v1/loras"),
            ("GET", "/metrics"),
        ):
            answer = client.request(method, path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["type"] == "ServiceUnavailableError"
