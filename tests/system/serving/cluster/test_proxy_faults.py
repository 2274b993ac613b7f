"""Instances that are down, end, hang or disagree: which other one answers, or which error."""

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

from serving.cluster.adapter_changes import AdapterChanges
from serving.cluster.proxy import Proxy
from serving.cluster.router import Router


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
        ):
            answer = client.request(method, path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        assert 'lora_jax:role_up{role="instance",number="1"} 0.0' in client.get("/metrics").text


class Mortal:
    """Instances whose connection breaks when a request is poison, as it does when they end."""

    def __init__(self, path):
        self.asked = 0
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.bind(path)
        self.sock.listen()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.sock.accept()
                with connection:
                    self.asked += 1
                    if b"poison" not in connection.recv(1 << 16):
                        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    def close(self):
        self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def test_a_poison_request_is_tried_twice_and_then_refused(tmp_path):
    """Before: it went to every instance, each time that it came."""
    paths = [str(tmp_path / f"i{n}") for n in range(3)]
    mortals = [Mortal(path) for path in paths]
    with (
        serve_app(Proxy(paths, Router(3), ["base"])) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        for _ in range(3):
            answer = client.post("/v1/completions", json={"model": "base", "prompt": "poison"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "60")
            assert "refused for some time" in answer.json()["error"]["message"]
        assert [mortal.asked for mortal in mortals] == [1, 1, 0]
        assert client.post("/v1/completions", json={"model": "base"}).status_code == 200
    for mortal in mortals:
        mortal.close()


def test_a_stream_that_is_cut_off_ends_with_an_error_event(client):
    """Before: the connection broke without a word."""
    text = client.get("/cut").text
    first, event, rest = text.split("\n\n")
    assert (first, rest) == ("data: 1", "")
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == 503


class Hung:
    """A process that is stopped: its socket takes connections, and nothing comes."""

    def __init__(self, path):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.bind(str(path))
        self.sock.listen(100)

    def kill(self):
        self.sock.close()


def test_metrics_do_not_wait_for_a_hung_instance(instances, tmp_path):
    """Before: /metrics hung as long as the instance did."""
    hung = Hung(tmp_path / "i0")
    paths, router = [str(tmp_path / f"i{n}") for n in range(2)], Router(2)
    with (
        listening(instances[1], paths[1]),
        serve_app(Proxy(paths, router, ["base"])) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        begun = time.monotonic()
        text = client.get("/metrics").text
        assert time.monotonic() - begun < 10
        assert 'up{engine="1"} 1.0' in text
        router.set_up(0, False)
        assert client.get("/health").json()["status"] == "degraded"
        hung.kill()


def test_what_a_hung_instance_was_given_goes_to_another_when_it_is_killed(instances, tmp_path):
    hung = Hung(tmp_path / "i0")
    paths = [str(tmp_path / f"i{n}") for n in range(2)]
    with (
        listening(instances[1], paths[1]),
        serve_app(Proxy(paths, Router(2), ["base"])) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        killer = threading.Timer(0.3, hung.kill)
        killer.start()
        assert client.post("/v1/completions", json={"model": "base"}).json()["instance"] == 1
        killer.join()


def test_an_instance_that_does_not_answer_in_time_is_busy_and_stays_up(client, router, monkeypatch):
    monkeypatch.setattr("serving.cluster.proxy.SHORT_S", 0.05)
    answer = client.get("/slow")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert router.up == (0, 1)


class HeldLock:
    """A lock that another change holds when it is first asked for; notes who was asked by then."""

    def __init__(self, instances):
        self.instances, self.asked, self.releases = instances, [], 0

    def acquire(self, blocking):
        assert not blocking  # the front serves others meanwhile
        self.asked.append([len(instance.asked) for instance in self.instances])
        return len(self.asked) > 1

    def release(self):
        self.releases += 1


class Disagreeing(AdapterChanges):
    """Changes that not all instances can follow."""

    def __init__(self, lock):
        super().__init__(None, lambda: ())
        self.lock = lock

    def agree(self, before):
        assert self.lock.releases == 0  # no other change begins before all agree
        return False


def test_a_change_waits_for_another_and_is_refused_if_not_all_can_follow(
    instances, router, tmp_path
):
    lock = HeldLock(instances)
    changes = Disagreeing(lock)
    paths = [tmp_path / f"i{n}" for n in range(2)]
    with contextlib.ExitStack() as stack:
        for app, path in zip(instances, paths, strict=True):
            stack.enter_context(listening(app, path))
        front = Proxy([str(p) for p in paths], router, ["base"], changes=changes)
        client = stack.enter_context(client_of(front))
        answer = client.post("/v1/load_lora_adapter", json={"lora_name": "x"})
    assert answer.status_code == 503
    assert "it was undone on all instances" in answer.json()["error"]["message"]
    assert (lock.asked, lock.releases) == ([[0, 0]] * 2, 1)
    assert all(instance.asked for instance in instances)
