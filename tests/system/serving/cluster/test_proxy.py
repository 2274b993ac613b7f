"""The front over small applications on Unix sockets: who is asked what, and what comes of it."""

import asyncio
import concurrent.futures
import contextlib
import json
import socket
import threading
import time

import httpx
import pytest
from support.cases.proxy_cases import client_of_front
from support.doubles.noting_instance import Instance
from support.processes.http_server import client_of, listening, serve_app

from serving.cluster.abstract_front import BodyLimits
from serving.cluster.addresses import FarAddress
from serving.cluster.proxy import Proxy
from serving.cluster.router import Router
from serving.http.access.auth import Authenticate
from serving.http.access.front_only import FrontOnly
from serving.http.access.keys import KeyRing
from serving.http.settings import HttpSettings, KeyLimits


@pytest.fixture
def instances():
    return [Instance(0), Instance(1)]


@pytest.fixture
def router():
    return Router(2, ["a", "b"])


@pytest.fixture
def client(instances, router, tmp_path):
    with client_of_front(instances, router, tmp_path) as client:
        yield client


def test_an_adapter_is_answered_by_its_own_instance(client, router, instances):
    for name, home in router.instance_of.items():
        for _ in range(3):
            answer = client.post("/v1/completions?x=1", json={"model": name, "max_tokens": 3})
            assert answer.json()["instance"] == home
            assert answer.headers["x-number"] == str(home)
    method, path, query, body = instances[0].asked[0]
    assert (method, path, query) == ("POST", "/v1/completions", b"x=1")
    assert json.loads(body)["max_tokens"] == 3


def test_an_instance_of_another_host_answers_its_front_alone(instances):
    """Over TCP, at an address that the front is told after an instance was started anew."""
    with serve_app(FrontOnly(instances[0], "s3")) as inner:
        port = int(inner.rpartition(":")[2])
        paths = [FarAddress("127.0.0.1", 1, "s3")]
        with client_of(Proxy(paths, Router(1), ["base"])) as client:
            assert client.post("/v1/completions", json={"model": "base"}).status_code == 503
            paths[0] = FarAddress("127.0.0.1", port, "s3")
            stolen = {"proxy-authorization": "Bearer other"}
            answer = client.post("/v1/completions", json={"model": "base"}, headers=stolen)
            assert (answer.status_code, answer.json()["instance"]) == (200, 0)
            paths[0] = FarAddress("127.0.0.1", port, "s4")
            assert client.get("/v1/models").status_code == 407
        assert httpx.get(f"{inner}/v1/models").status_code == 407
    assert len(instances[0].asked) == 1


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
    lines = client.get("/metrics").text.splitlines()
    assert lines[-2:] == ['up{engine="0"} 1.0', 'up{engine="1"} 1.0']
    assert 'lora_jax:role_up{role="instance",number="1"} 1.0' in lines


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


def test_a_body_that_does_not_come_is_408():
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
    limits = BodyLimits(body_timeout_s=0.5)  # the instance is not asked: it is not there
    with serve_app(Proxy(["none"], Router(1), ["base"], limits)) as url:
        where = httpx.URL(url)
        with socket.create_connection((where.host, where.port), 25) as sock:
            sock.sendall(head)
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 408 ")


def keyed(app, key="right"):
    """The front as the command makes it: the key first."""
    return Authenticate(app, KeyRing(HttpSettings(api_keys=(key,))))


@pytest.fixture
def closed(instances, router, tmp_path):
    """A client without a key of a front that wants one."""
    paths = [tmp_path / f"i{n}" for n in range(2)]
    with contextlib.ExitStack() as stack:
        for app, path in zip(instances, paths, strict=True):
            stack.enter_context(listening(app, path))
        front = Proxy([str(p) for p in paths], router, ["base"])
        url = stack.enter_context(serve_app(keyed(front)))
        yield stack.enter_context(httpx.Client(base_url=url, timeout=30))


def test_without_the_key_no_name_is_kept_and_no_instance_is_asked(closed, router, instances):
    """Before: 12 names of 15 MB, no key, made the router grow by 500 MB for good."""
    for number in range(3):
        body = {"model": f"{number}" + "n" * (15 << 20)}
        assert closed.post("/v1/completions", json=body).status_code == 401
    assert sorted(router.instance_of) == ["a", "b"]
    assert not any(instance.asked for instance in instances)
    right = {"Authorization": "Bearer right"}
    for number in range(20):
        body = {"model": f"{number}" + "n" * 100}
        assert closed.post("/v1/completions", json=body, headers=right).status_code == 200
    assert sorted(router.instance_of) == ["a", "b"]  # no such name can exist
    assert router.up == (0, 1)  # before: both were "down: Broken pipe"


class Running:
    """The sequences that all instances run at one time; the first request waits for a second."""

    def __init__(self):
        self.lock, self.now, self.most = threading.Lock(), 0, 0
        self.two = threading.Event()

    def add(self, sequences):
        with self.lock:
            self.now += sequences
            self.most = max(self.most, self.now)
        if self.most >= 2:
            self.two.set()

    def in_front_of(self, app):
        """Return `app`, whose requests are counted by their `n`."""

        async def answer(scope, receive, send):
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            message = await receive()
            sequences = json.loads(message["body"])["n"]
            self.add(sequences)
            await asyncio.to_thread(self.two.wait, 60)
            messages = [message]

            async def again():
                return messages.pop() if messages else await receive()

            async def counted(message):
                # Before the end of the answer goes out: the next request may come at once.
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    self.add(-sequences)
                await send(message)

            await app(scope, again, counted)

        return answer


def test_a_keys_sequences_are_counted_over_all_instances(instances, router, tmp_path):
    """Before: each instance let the key run its limit."""
    paths, running = [tmp_path / f"i{n}" for n in range(2)], Running()
    settings = HttpSettings(api_keys=("key",), key_limits=KeyLimits(max_running=2))
    with contextlib.ExitStack() as stack:
        for app, path in zip(instances, paths, strict=True):
            stack.enter_context(listening(running.in_front_of(app), path))
        proxy = Proxy([str(p) for p in paths], router, ["base"])
        url = stack.enter_context(serve_app(Authenticate(proxy, KeyRing(settings))))
        headers = {"Authorization": "Bearer key"}
        client = stack.enter_context(httpx.Client(base_url=url, timeout=90, headers=headers))
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(8))

        def ask(adapter, n):
            body = {"model": adapter, "prompt": "x", "n": n}
            return pool.submit(client.post, "/v1/completions", json=body)

        asked = [ask("ab"[i % 2], 1) for i in range(8)]  # two of them run, of any instances
        assert {one.result().status_code for one in asked} == {200}
        asked = [ask("ab"[i % 2], 1 + i // 2 % 2) for i in range(16)]
        assert {one.result().status_code for one in asked} == {200}
        assert all(len(instance.asked) >= 4 for instance in instances)
        assert running.most == 2
        end = time.monotonic() + 60  # a client has its answer a moment before the key its room
        while proxy._ledger.num_keys:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_without_the_key_no_body_is_read(closed):
    """Before: the router waited for the body, and kept 15.9 MB of it for 30 s."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15900000\r\n\r\n"
    with socket.create_connection((closed.base_url.host, closed.base_url.port), 30) as sock:
        begun = time.monotonic()
        sock.sendall(head)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
        assert time.monotonic() - begun < 10


def test_a_declared_length_over_the_limit_reaches_no_instance(client, instances):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port), 30) as sock:
        sock.sendall(head)
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
    assert not any(instance.asked for instance in instances)


def test_deep_json_is_the_instances_to_judge(client, router):
    """Before: a RecursionError, status 500 and a traceback."""
    for body in (b"[" * 200_000, b'{"a":' * 200_000, b"{not json", b"\xff\xfe"):
        assert client.post("/v1/completions", content=body).status_code == 200
    assert router.up == (0, 1)


def test_health_sums_the_roles_and_live_is_apart(client, router):
    for path in ("/health", "/ready", "/live"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    router.set_up(0, False)
    answer = client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    assert answer.json()["instances"] == ["down", "up"]
    router.set_up(1, False)
    assert [client.get(path).status_code for path in ("/health", "/ready", "/live")] == [
        503,
        503,
        200,
    ]


def test_an_adapter_that_its_instance_does_not_know_is_forgotten(client, router, instances):
    for instance in instances:
        instance.status = 404
    assert client.post("/v1/completions", json={"model": "base:new"}).status_code == 404
    assert "new" not in router.instance_of


def test_metrics_that_an_instance_refuses_are_its_answer(client, instances):
    instances[1].status = 403
    answer = client.get("/metrics")
    assert (answer.status_code, answer.headers["x-number"]) == (403, "1")
