"""The bench of bad requests sees who waits, who fails, and the process that checks structures."""

import os
import subprocess
import sys

import pytest
from support.doubles.fake_engine import FakeEngine
from support.processes.http_server import serve_app
from support.waiting import wait_until

from bench.bad_requests import CHECKER, Watch, ask_next, checker_of, post, resident
from serving.http.app import create_app


@pytest.fixture(scope="module")
def url():
    with serve_app(create_app(FakeEngine())) as url:
        yield url


def test_another_caller_is_watched(url):
    watch = Watch(url, os.getpid())
    with watch.on():
        wait_until(lambda: watch.num_asked > 2 and watch.server_bytes)
    assert not watch.failed
    assert 0 < watch.worst_s < 60
    assert watch.server_bytes > 1 << 20


def test_a_caller_that_fails_is_told():
    watch = Watch("http://127.0.0.1:9", os.getpid())  # nobody listens there
    with watch.on():
        wait_until(lambda: watch.failed)
    assert "refused" in watch.failed


def test_a_next_request_without_its_answer_fails(url):
    with pytest.raises(RuntimeError, match="the next request failed: 200"):
        ask_next(url, 1)  # this engine binds no answers
    status, answer = post(f"{url}/v1/completions", {"prompt": "x", "structured_outputs": {}})
    assert (status, answer["error"]["param"]) == (400, "structured_outputs")


def test_the_process_that_checks_is_found_among_the_server_s():
    command = [sys.executable, "-S", "-c", "input()", CHECKER.decode()]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        wait_until(lambda: checker_of(os.getpid()) == process.pid)
        wait_until(lambda: resident(process.pid) > 1 << 20)  # it has only just begun
        process.communicate(b"\n")
    assert checker_of(os.getpid()) is None
    assert resident(process.pid) == 0
