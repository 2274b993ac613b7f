"""A page that points its own name at this machine gets no answer."""

import socket

import httpx
import pytest
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import serve_app

from serving.cli.serve import guarded
from serving.http.access.local_names import LocalNames, is_local_name
from serving.http.app import create_app
from serving.http.settings import HttpSettings
from serving.launch import read_options


@pytest.mark.parametrize(
    "host",
    ["", "localhost", "LOCALHOST:80", "a.localhost:1", "127.0.0.1:8000", "0.0.0.0", "[::1]:8000"],
)
def test_this_machine_s_names(host):
    assert is_local_name(host)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "["]
)
def test_names_that_may_be_anybody_s(host):
    assert not is_local_name(host)


@pytest.fixture(scope="module")
def url():
    with serve_app(LocalNames(create_app(FakeEngine(), HttpSettings()))) as url:
        yield url


def test_a_rebound_name_is_refused_before_anything_is_read(url):
    ask = {"prompt": "x", "max_tokens": 1}
    assert httpx.post(f"{url}/v1/completions", json=ask, timeout=60).status_code == 200
    evil = {"Host": "evil.example"}
    answer = httpx.post(f"{url}/v1/completions", json=ask, headers=evil, timeout=60)
    assert answer.status_code == 403
    assert "--api-key" in answer.json()["error"]["message"]
    evil = {"Host": "evil.example:80"}
    assert httpx.get(f"{url}/v1/models", headers=evil, timeout=60).status_code == 403


@pytest.mark.parametrize(
    ("flags", "guards"),
    [
        ([], True),
        (["--host", "localhost"], True),
        (["--api-key", "k"], False),
        (["--insecure"], False),
        (["--host", "0.0.0.0", "--insecure"], False),
    ],
)
def test_which_servers_are_guarded(flags, guards):
    options = read_options(["m", *flags], {})
    with socket.socket() as sock:
        assert isinstance(guarded(max, options, sock), LocalNames) == guards
    with socket.socket(socket.AF_UNIX) as sock:
        assert guarded(max, options, sock) is max  # an instance: its front has been asked
