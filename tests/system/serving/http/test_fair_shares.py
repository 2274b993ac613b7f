"""Several keys over a real engine: none shuts another out, and no answer depends on the others."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import socket
import statistics
import threading
import time

import httpx
import pytest
from support.cases.engine_cases import settle
from support.processes.http_server import client_of
from support.processes.server_process import serve
from support.waiting import wait_until

from serving.http.access.key_hash import new_key
from serving.http.app import create_app
from serving.http.settings import HttpSettings, Tenant

TENANTS = HttpSettings(tenants=(Tenant("key-a", id="a"), Tenant("key-b", id="b", weight=2.0)))


@pytest.fixture(scope="module")
def shared_client(real_engine):
    with client_of(create_app(real_engine, TENANTS)) as client:
        yield client


def ask(client: httpx.Client, key: str, **body) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"max_tokens": 24, "ignore_eos": True, "seed": 5, "logprobs": 1, **body}
    return client.post("/v1/completions", json=body, headers=headers)


class Steps:
    """The engine's steps, one at a time: a flood does not end before others have come."""

    def __init__(self, engine, monkeypatch, most_free: int):
        """They run freely until so many sequences run, and from `free` on."""
        self._most_free, self._engine, self._is_free = most_free, engine, False
        self._arrived, self._go = threading.Semaphore(0), threading.Semaphore(0)
        self._held = threading.Event()
        self._send = engine._loop._send
        monkeypatch.setattr(engine._loop, "_send", self._at_the_gate)

    def wait_held(self) -> None:
        assert self._held.wait(60), "too few sequences ran"

    def run(self, count: int) -> None:
        for _ in range(count):
            assert self._arrived.acquire(timeout=60), "no step came"
            self._go.release()

    def free(self) -> None:
        self._is_free = True
        self._go.release()

    def _at_the_gate(self, plan, now):
        if plan is None:
            return None
        if self._held.is_set() or self._engine.stats().running >= self._most_free:
            self._held.set()
            if not self._is_free:
                self._arrived.release()
                assert self._go.acquire(timeout=60), "the test has stopped"
        return self._send(plan, now)


@contextlib.contextmanager
def held_steps(engine, most_free: int):
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(engine, patch, most_free)
        try:
            yield steps
        finally:
            steps.free()


def wait_for_waiting(engine, count: int) -> None:
    end = time.monotonic() + 60
    while engine.stats().waiting < count:
        assert time.monotonic() < end, "too few sequences wait"
        time.sleep(0.001)


def test_answers_beside_a_flood_of_another_key_have_the_bits_of_those_alone(
    shared_client, real_engine
):
    asked = [{"prompt": f"number {i}", "model": m} for i in range(3) for m in ("tiny", "a", "b")]
    flood = {"prompt": "a b c", "model": "a", "n": 16, "max_tokens": 100, "temperature": 1.0}
    alone = [ask(shared_client, "key-b", **body).json()["choices"] for body in asked]
    flood_alone = ask(shared_client, "key-a", **flood).json()["choices"]
    before = real_engine.stats().preemptions
    with concurrent.futures.ThreadPoolExecutor(8) as pool, held_steps(real_engine, 8) as steps:
        flooding = pool.submit(ask, shared_client, "key-a", **flood)
        steps.wait_held()
        asking = [pool.submit(ask, shared_client, "key-b", **body) for body in asked]
        wait_for_waiting(real_engine, 8 + 3)  # the rest of the flood, and some others
        steps.free()
        beside = [answer.result() for answer in asking]
    assert [answer.json()["choices"] for answer in beside] == alone
    assert flooding.result().json()["choices"] == flood_alone
    assert real_engine.stats().preemptions > before, "the flood kept its rows"
    settle(real_engine)


def test_a_key_whose_adapters_hold_all_slots_gives_one_up(shared_client, real_engine):
    """Two slots, both in use by one key for as long as its long answers take."""
    mine = {"prompt": "hello", "model": "c", "max_tokens": 3}
    long = {"prompt": "a b c", "n": 3, "max_tokens": 110, "temperature": 1.0}
    alone = ask(shared_client, "key-b", **mine).json()["choices"]
    flood_alone = [
        ask(shared_client, "key-a", model=name, **long).json()["choices"] for name in ("a", "b")
    ]
    with concurrent.futures.ThreadPoolExecutor(3) as pool, held_steps(real_engine, 3) as steps:
        floods = [pool.submit(ask, shared_client, "key-a", model="a", **long)]
        steps.wait_held()
        floods.append(pool.submit(ask, shared_client, "key-a", model="b", **long))
        wait_for_waiting(real_engine, 3)
        steps.run(20)
        assert real_engine.stats().running == 6, "the slots are not in use"
        asking = pool.submit(ask, shared_client, "key-b", **mine)
        wait_for_waiting(real_engine, 1)
        steps.run(60)  # of the 110 that a flood takes
        beside = asking.result(timeout=60).json()["choices"]
        assert not any(flood.done() for flood in floods), "it waited for the flood's end"
        steps.free()
    assert beside == alone
    assert [flood.result().json()["choices"] for flood in floods] == flood_alone
    settle(real_engine)


def test_one_keys_adapter_does_not_shut_out_anothers(shared_client, real_engine, monkeypatch):
    """Host memory for one adapter at a time, two keys with an adapter each, in turn."""
    registry, answers = real_engine.registry, {}
    for name in ("a", "c"):
        answers[name] = ask(shared_client, "key-a", prompt="hello", model=name).json()["choices"]
    size = registry.get("a").report.weight_bytes
    limits = dataclasses.replace(registry.limits, max_total_bytes=size)
    monkeypatch.setattr(registry._tier, "_limits", limits)
    for entry in registry.entries():
        registry.unload(entry.name)
    for key, name in (("key-a", "a"), ("key-b", "c"), ("key-a", "a"), ("key-b", "c")):
        answer = ask(shared_client, key, prompt="hello", model=name)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == answers[name]
        assert [entry.name for entry in registry.entries()] == [name]
    long = {"prompt": "a b c", "max_tokens": 100}
    with concurrent.futures.ThreadPoolExecutor(2) as pool, held_steps(real_engine, 1) as steps:
        first = pool.submit(ask, shared_client, "key-a", model="a", **long)
        steps.wait_held()
        second = pool.submit(ask, shared_client, "key-b", prompt="hello", model="c")
        wait_until(lambda: len(registry.line) == 1)
        stats = real_engine.stats()
        assert (stats.waiting, stats.waiting_for_adapter) == (1, 1)
        steps.free()
        assert first.result().status_code == 200
        assert second.result().json()["choices"] == answers["c"]


PROMPTS = {
    "short": "once upon a time",
    "long": "the big dog ran to the park and saw a bird " * 8,
}
RUNNING = "vllm:num_requests_running{"


def first_token_s(client: httpx.Client, url: str, key: str, prompt: str) -> float:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": "intent", "prompt": prompt, "max_tokens": 4, "stream": True}
    start = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200
        next(line for line in answer.iter_lines() if line.startswith("data:"))
        return time.perf_counter() - start


@contextlib.contextmanager
def flood(url: str, key: str, *, num: int = 8):
    """Requests of n=128, `num` at once, until the context ends; they are given up then.

    They are not streamed, and nobody reads: the client's work is not the flood's.
    """
    body = {"model": "law", "prompt": "A contract is", "n": 128, "max_tokens": 1800}
    data = json.dumps(body | {"ignore_eos": True, "temperature": 1.0}).encode()
    where = httpx.URL(url)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc.decode()}\r\n"
    head += f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    with contextlib.ExitStack() as stack:
        for _ in range(num):
            link = stack.enter_context(socket.create_connection((where.host, where.port)))
            link.sendall(head.encode() + data)
        yield


def wait_for_running(client: httpx.Client, url: str, key: str, low: int, high: int) -> None:
    """Wait until so many sequences run, both bounds included."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        page = client.get(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"}).text
        lines = [line for line in page.splitlines() if line.startswith(RUNNING)]
        if low <= sum(float(line.split()[-1]) for line in lines) <= high:
            return
        time.sleep(0.05)
    raise AssertionError(f"never {low} to {high} sequences ran: {lines}")


@pytest.mark.slow
def test_a_flood_of_another_key_at_most_doubles_the_time_to_the_first_token(tmp_path):
    """Eight requests of n=128 at a time, with the shipped model; medians.

    Alone and beside the flood in turn, so that other work on the machine slows both. Work that
    comes and goes slows one of them: the times of three measurements tell more than the first.
    """
    keys = {name: new_key(name) for name in ("flood", "caller")}
    file = tmp_path / "keys"
    roles = {"roles": ["user", "metrics"]}
    lines = [json.dumps({"id": name, "hash": made, **roles}) for name, (_, made) in keys.items()]
    file.write_text("\n".join(lines))
    file.chmod(0o600)
    numbers = itertools.count()
    arguments = ("assets/tiny-moe", "--lora-dir", "assets/tiny-moe/adapters")
    with (
        serve(*arguments, "--keys-file", str(file), log=tmp_path / "log") as url,
        httpx.Client(timeout=60) as client,
    ):

        def first_tokens(times: dict[str, list[float]]) -> None:
            for words in (*PROMPTS,) * 5:
                prompt = f"{next(numbers)} {PROMPTS[words]}"
                seconds = first_token_s(client, url, keys["caller"][0], prompt)
                times[words].append(seconds)
                time.sleep(0.05)

        def measure() -> dict[str, float]:
            """Return how much longer the first token takes beside the flood, by prompt."""
            alone, beside = ({words: [] for words in PROMPTS} for _ in range(2))
            for _ in range(6):
                wait_for_running(client, url, keys["caller"][0], 0, 0)
                first_tokens(alone)
                with flood(url, keys["flood"][0]):
                    wait_for_running(client, url, keys["caller"][0], 32, 32)
                    first_tokens(beside)
            median = statistics.median
            return {words: median(beside[words]) / median(alone[words]) for words in PROMPTS}

        first_tokens({words: [] for words in PROMPTS})  # of programs that are read
        found = []
        while len(found) < 3 and not (found and max(found[-1].values()) <= 2):
            found.append(measure())
    best = {words: min(ratios[words] for ratios in found) for words in PROMPTS}
    assert max(best.values()) <= 2, found
