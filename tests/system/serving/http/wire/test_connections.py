"""Silent, slow and stuck clients over real sockets: they are ended, and others do not notice."""

import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from support.doubles.fake_engine import FakeEngine

from serving.http.app import create_app
from serving.http.wire import connections
from serving.http.wire.connections import ConnectionLimits, fitting
from serving.http.wire.uvicorn_server import AnnouncingServer, uvicorn_config

LIMITS = ConnectionLimits(most=20, head_s=1.0, body_s=1.0, stuck_s=1.0)
HEAD = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"


@contextlib.contextmanager
def serving(app, limits=LIMITS, **more):
    """Serve in a thread; yield the address."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)  # little is kept unread
        sock.bind(("127.0.0.1", 0))
        server = AnnouncingServer(uvicorn_config(app, limits, **more), lambda: None)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield sock.getsockname()
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def engine():
    return FakeEngine(max_model_len=4096)


@pytest.fixture(scope="module")
def address(engine):
    with serving(create_app(engine)) as address:
        yield address


def ended(sock, begun, limit_s=20):
    """Return the seconds from `begun` until the server closes the connection."""
    sock.settimeout(limit_s)
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass
    return time.monotonic() - begun


def is_well(address):
    begun = time.monotonic()
    answer = httpx.get(f"http://{address[0]}:{address[1]}/health", timeout=20)
    assert answer.status_code == 200
    return time.monotonic() - begun


def wait_idle(engine):
    end = time.monotonic() + 20
    while engine.running and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize(
    "said", [b"", b"GET /ver", HEAD, HEAD + b"\r\n" + HEAD], ids=["nothing", "line", "head", "next"]
)
def test_a_head_that_does_not_come_ends_the_connection(address, said):
    """Before: it was open after 150 s."""
    begun = time.monotonic()
    with socket.create_connection(address) as sock:
        sock.sendall(said)
        assert 0.5 < ended(sock, begun) < 15


def test_a_head_that_drips_ends_the_connection(address):
    with socket.create_connection(address) as sock:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in HEAD * 100:
                sock.sendall(bytes([byte]))
                time.sleep(0.05)
        assert time.monotonic() - begun < 15


def test_a_body_that_nobody_reads_has_a_deadline(address):
    with socket.create_connection(address) as sock:
        sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        assert ended(sock, time.monotonic()) < 15


def test_connections_that_are_used_stay(address):
    with httpx.Client(base_url=f"http://{address[0]}:{address[1]}") as client:
        for _ in range(6):
            assert client.get("/version").status_code == 200
            time.sleep(0.3)


def test_health_answers_while_300_silent_connections_are_open(engine, caplog):
    """Before: 0 of 30 answers with a limit of 256 descriptors, and no line in the log."""
    with serving(create_app(engine)) as address, contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(address, timeout=20))
        assert max(is_well(address) for _ in range(10)) < 10
    assert "the limit is 20" in caplog.text
    assert caplog.text.count("the limit is") < 5


SERVER = """
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from support.doubles.fake_engine import FakeEngine
from serving.http.app import create_app
from serving.http.wire.connections import ConnectionLimits, fitting
from serving.http.wire.uvicorn_server import AnnouncingServer, bind, uvicorn_config
sock = bind("127.0.0.1", 0)
config = uvicorn_config(create_app(FakeEngine()), fitting(ConnectionLimits()), loop="asyncio")
AnnouncingServer(config, lambda: print(sock.getsockname()[1], flush=True)).run(sockets=[sock])
"""


def test_so_it_does_with_128_descriptors():
    """Before: 0 of 40 answers, until the silent ones left."""
    command = [sys.executable, "-c", SERVER]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | path) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.terminate)
        address = "127.0.0.1", int(process.stdout.readline())
        for _ in range(300):
            stack.enter_context(socket.create_connection(address, timeout=20))
        assert max(is_well(address) for _ in range(10)) < 10


def test_when_all_connections_work_others_are_refused_and_probes_are_not(engine, address):
    engine.open.clear()
    url = f"http://{address[0]}:{address[1]}"
    body = {"model": "fake-base", "prompt": "x", "max_tokens": 3, "stream": True}
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                client = stack.enter_context(httpx.Client(timeout=30))
                stack.enter_context(client.stream("POST", f"{url}/v1/completions", json=body))
            is_well(address)
            answer = httpx.post(f"{url}/v1/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "Too many connections" in answer.json()["error"]["message"]
    finally:
        engine.open.set()
        wait_idle(engine)


def test_a_client_that_does_not_read_is_ended_and_its_request_with_it(engine, address, monkeypatch):
    """Before: its text was kept for it, as long as it stayed."""
    deltas = engine._deltas

    def paced(*args):
        for delta in deltas(*args):
            time.sleep(0.001)  # the request must outlive the limit for stuck clients
            yield delta

    monkeypatch.setattr(engine, "_deltas", paced)
    text = json.dumps(
        {"model": "fake-base", "prompt": "x", "max_tokens": 4000, "stream": True, "n": 16}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(address)
        before = len(engine.aborted)
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(text) + text)
        end = time.monotonic() + 90
        while len(engine.aborted) == before:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert is_well(address) < 10
    wait_idle(engine)


def test_a_client_that_leaves_while_it_sends_is_one_line(address, caplog):
    """Before: "Unexpected error" with 70 lines, and a 5xx in the counters."""
    caplog.set_level("INFO")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(address) as sock:
        sock.sendall(head + b"Content-Length: 500\r\n\r\n{")
        time.sleep(0.2)
    end = time.monotonic() + 20
    while "A client left before" not in caplog.text:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert "Traceback" not in caplog.text
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    metrics = httpx.get(f"http://{address[0]}:{address[1]}/metrics").text
    assert 'handler="/v1/completions",method="POST",status="5xx"' not in metrics


def test_limits_fit_the_descriptors(monkeypatch, caplog):
    set_to = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1 << 20))
    assert fitting(ConnectionLimits()).most == 1000
    assert set_to[-1][0] > 1000  # raised as far as is needed
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (400, 400))
    found = fitting(ConnectionLimits())
    assert 1 <= found.most < 304
    assert fitting(ConnectionLimits(), 2).most < found.most / 2
    assert "may open 400 files" in caplog.text


def test_an_accept_that_fails_is_said_once(caplog):
    async def run():
        loop = asyncio.get_running_loop()
        connections.log_descriptors(loop)
        for _ in range(5):
            text = "socket.accept() out of system resource"
            loop.call_exception_handler({"message": text, "exception": OSError(24, "Too many")})

    asyncio.run(run())
    assert caplog.text.count("No connection can be accepted: [Errno 24] Too many.") == 1
