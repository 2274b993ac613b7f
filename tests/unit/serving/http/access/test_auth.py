"""Every route needs the key, whatever is added later; /health and the demo page do not."""

import concurrent.futures
import re
import time

import httpx
import pytest
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import client_of

from serving.api.request import Share
from serving.http.access import failed_keys
from serving.http.app import create_app
from serving.http.settings import HttpSettings, KeyLimits, Tenant

SETTINGS = HttpSettings(
    api_keys=("user-key", "other-key"),
    admin_keys=("admin-key",),
    enable_runtime_lora=True,
    demo=True,
)
OPEN = {"/", "/docs", "/health", "/live", "/ping", "/ready"}


def every_route(app) -> list[tuple[str, str]]:
    """Method and path of every route the app has, parameters filled in."""
    found = []
    for path, methods in app_routes(app).items():
        found += [(method, re.sub(r"{[^}]*}", "x", path)) for method in methods]
    return found


def app_routes(app) -> dict[str, set[str]]:
    routes: dict[str, set[str]] = {}

    def walk(items) -> None:
        for route in items:
            if hasattr(route, "methods"):
                routes.setdefault(route.path, set()).update(route.methods or ())
            for name in ("routes", "original_router"):
                inner = getattr(route, name, None)
                if inner is not None:
                    walk(getattr(inner, "routes", inner))

    walk(app.routes)
    return routes


@pytest.fixture(scope="module")
def app(lora_dir):
    return create_app(FakeEngine(lora_dir), SETTINGS)


@pytest.fixture(scope="module")
def client(app):
    with client_of(app) as client:
        yield client


def test_the_enumeration_sees_the_whole_app(app):
    paths = {path for _, path in every_route(app)}
    assert len(paths) >= 20
    assert {"/v1/completions", "/v1/loras/x", "/openapi.json", "/tokenize", *OPEN} <= paths


def test_every_route_but_the_open_ones_answers_401_without_a_key(app, client):
    for method, path in every_route(app):
        answer = client.request(method, path)
        if path in OPEN and (method in ("GET", "HEAD") or path == "/ping"):
            assert answer.status_code == 200, path
        else:
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                assert answer.json()["error"]["code"] == 401


@pytest.mark.parametrize("path", ["/no/such/route", "/v1", "//v1/models", "/HEALTH", "/health/"])
def test_paths_that_do_not_exist_are_401_too(client, path):
    assert client.get(path).status_code == 401
    assert client.options(path).status_code == 401


WRONG = ["Bearer wrong", "Bearer user-ke", "Bearer user-keyy", "Basic user-key", "user-key"]
WRONG += ["Bearer", "Bearer user-key other-key", "Bearer \xe9"]


@pytest.mark.parametrize("header", WRONG)
def test_wrong_keys_are_401(client, header):
    headers = httpx.Headers({"Authorization": header}, encoding="latin-1")
    assert client.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("key", ["user-key", "other-key", "admin-key"])
def test_right_keys_work(client, key):
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} {key}"}
        assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/metrics", headers=headers).status_code == 200


def test_without_keys_any_key_will_do(lora_dir):
    with client_of(create_app(FakeEngine(lora_dir))) as client:
        assert client.get("/v1/models").status_code == 200
        headers = {"Authorization": "Bearer EMPTY"}
        assert client.get("/v1/models", headers=headers).status_code == 200


def test_a_metrics_key_closes_metrics_for_others():
    settings = HttpSettings(api_keys=("user",), admin_keys=("root",), metrics_keys=("prom",))
    with client_of(create_app(FakeEngine(), settings)) as client:

        def status(path: str, key: str | None) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return client.get(path, headers=headers).status_code

        for path in ("/metrics", "/metrics/"):
            got = [status(path, key) for key in (None, "bad", "user", "prom", "root")]
            assert got == [401, 401, 403, 200, 200]
        assert status("/v1/models", "prom") == 403
        assert status("/health", "bad") == 200


def test_tenants_see_their_adapters_have_a_rate_and_a_salt_of_their_own(lora_dir):
    tenants = (
        Tenant("a", frozenset({"law"}), rate=1 / 600),  # one in ten minutes: however late we ask
        Tenant("b", salt="shared"),
        Tenant("c", salt="shared"),
    )
    engine = FakeEngine(lora_dir)
    with client_of(create_app(engine, HttpSettings(tenants=tenants))) as client:

        def ask(key: str, model: str | None = None) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "x", "model": model}
            return client.post("/v1/completions", json=body, headers=headers)

        assert ask("b", "sql").status_code == 200
        assert ask("c", "sql").status_code == 200
        assert ask("a", "law").status_code == 200
        limited = ask("a", "law")
        assert limited.status_code == 429
        assert 300 < int(limited.headers["retry-after"]) <= 600
        salts = [given.salt for given in engine.submitted]
        assert salts[0] == salts[1] != salts[2]
        assert "" not in salts
        headers = {"Authorization": "Bearer b"}
        names = [m["id"] for m in client.get("/v1/models", headers=headers).json()["data"]]
        assert names == ["fake-base", "law", "sql"]


def test_a_hidden_adapter_is_nowhere(lora_dir):
    engine = FakeEngine(lora_dir)
    engine.registry.resolve("sql")
    settings = HttpSettings(tenants=(Tenant("a", frozenset({"law"})),))
    with client_of(create_app(engine, settings), Authorization="Bearer a") as client:
        assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["fake-base", "law"]
        assert client.get("/v1/loras").json()["count"] == 0
        for path in ("/v1/models/sql", "/v1/adapters/sql"):
            assert client.get(path).status_code == 404
        for path in ("/v1/completions", "/tokenize"):
            hidden = client.post(path, json={"prompt": "x", "model": "sql"})
            unknown = client.post(path, json={"prompt": "x", "model": "zzz"})
            assert hidden.status_code == unknown.status_code == 404
            assert hidden.text == unknown.text.replace("zzz", "sql")


def test_the_routes_page_needs_the_key_where_no_demo_page_is_served():
    with client_of(create_app(FakeEngine(), HttpSettings(api_keys=("k",)))) as closed:
        assert closed.get("/docs").status_code == 401
        assert closed.get("/docs", headers={"Authorization": "Bearer k"}).status_code == 200


def test_metrics_show_nothing_without_a_key_once_there_is_one(lora_dir):
    tenants = (
        Tenant("a", frozenset({"law"}), id="a"),
        Tenant("prom", id="prom", roles=frozenset({"metrics"})),
        Tenant("root", id="root", roles=frozenset({"admin"})),
    )
    with client_of(create_app(FakeEngine(lora_dir), HttpSettings(tenants=tenants))) as client:

        def status(key: str | None) -> int:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return client.get("/metrics", headers=headers).status_code

        assert [status(key) for key in (None, "wrong", "a", "prom", "root")] == [
            401,
            401,
            403,
            200,
            200,
        ]


def test_a_key_is_told_its_limit_and_when_to_come_again(lora_dir):
    limits = KeyLimits(tokens_per_minute=30)
    settings = HttpSettings(api_keys=("one", "two"), key_limits=limits)
    with client_of(create_app(FakeEngine(lora_dir), settings)) as client:

        def ask(key: str) -> httpx.Response:
            body = {"prompt": "x" * 9, "max_tokens": 30, "n": 2}
            headers = {"Authorization": f"Bearer {key}"}
            return client.post("/v1/completions", json=body, headers=headers)

        assert ask("one").status_code == 200
        limited = ask("one")
        assert limited.status_code == 429
        assert "tokens_per_minute=30" in limited.json()["error"]["message"]
        # 10 of the prompt and 60 of the answer against 30: 40 and one more are owed.
        assert 75 <= int(limited.headers["retry-after"]) <= 83
        assert ask("two").status_code == 200


def test_the_engine_is_told_whose_request_it_is(lora_dir):
    engine = FakeEngine(lora_dir)
    settings = HttpSettings(api_keys=("one",), key_limits=KeyLimits(max_running=3, max_waiting=4))
    with client_of(create_app(engine, settings), Authorization="Bearer one") as client:
        client.post("/v1/completions", json={"prompt": "x"})
    with client_of(create_app(engine)) as client:
        client.post("/v1/completions", json={"prompt": "x"})
    shares = [given.share for given in engine.submitted]
    assert shares == [Share("api-key-1", 1.0, 3, 4), Share()]


def test_many_wrong_keys_are_counted_and_answered_later_but_right_ones_at_once(monkeypatch):
    monkeypatch.setattr(failed_keys, "_HALF_LIFE_S", 1e6)  # none is forgotten meanwhile
    settings = HttpSettings(api_keys=("user",), admin_keys=("root",))
    with client_of(create_app(FakeEngine(), settings)) as client:

        def seconds(key: str, want: int) -> float:
            start = time.perf_counter()
            answer = client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == want
            return time.perf_counter() - start

        for _ in range(12):
            seconds("wrong", 401)
        slow = min(seconds("wrong", 401) for _ in range(3))
        assert slow > 0.1
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            held = [pool.submit(seconds, "wrong", 401) for _ in range(8)]
            right = min(seconds("user", 200) for _ in range(5))
            assert right < min(one.result() for one in held)
        text = client.get("/metrics", headers={"Authorization": "Bearer root"}).text
        assert 'lora_jax:failed_keys_total{why="unknown"} 23.0' in text
