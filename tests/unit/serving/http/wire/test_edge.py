"""Other origins' pages and a proxy's path, in front of keys and routes."""

import socket

import httpx
import pytest
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import serve_app

from serving.cli.serve import guarded
from serving.http.app import create_app
from serving.launch import read_options

ORIGIN = "https://page.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


WAIT_S = 60  # for an answer, on a busy machine


def serve(*flags: str):
    options = read_options(["m", *flags], {})
    with socket.socket() as sock:
        return serve_app(guarded(create_app(FakeEngine(), options.http), options, sock))


@pytest.fixture(scope="module")
def open_url():
    with serve("--api-key", "k", "--allowed-origins", f'["{ORIGIN}"]') as url:
        yield url


def test_a_preflight_needs_no_key(open_url):
    answer = httpx.options(f"{open_url}/v1/completions", headers=PREFLIGHT, timeout=WAIT_S)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "authorization" in answer.headers["access-control-allow-headers"]


def test_an_answer_names_the_origin_also_when_it_is_an_error(open_url):
    for key, status in (("k", 200), ("wrong", 401)):
        headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}"}
        answer = httpx.get(f"{open_url}/v1/models", headers=headers, timeout=WAIT_S)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


def test_other_origins_are_not_named(open_url):
    answer = httpx.options(
        f"{open_url}/v1/completions",
        headers=PREFLIGHT | {"Origin": "https://evil.example"},
        timeout=WAIT_S,
    )
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


def test_without_the_flag_no_origin_is_named():
    with serve() as url:
        answer = httpx.get(f"{url}/v1/models", headers={"Origin": ORIGIN}, timeout=WAIT_S)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_proxy_s_path_is_taken_off_before_keys_are_looked_at():
    flags = "--api-key", "k", "--metrics-key", "m", "--root-path", "/llm"
    with serve(*flags) as url, httpx.Client(timeout=WAIT_S) as client:
        key = {"Authorization": "Bearer k"}
        assert client.get(f"{url}/llm/health").status_code == 200
        for path in ("/llm/v1/models", "/v1/models"):
            assert client.get(url + path, headers=key).status_code == 200
            assert client.get(url + path).status_code == 401
        # The key for the model is not the one for the metrics, whatever path leads there.
        assert client.get(f"{url}/llm/metrics", headers=key).status_code == 403
        assert client.get(f"{url}/llmx/health").status_code == 401
