"""uvicorn's limits: headers, sockets, the announcement."""

import asyncio
import os
import socket

import pytest
from support.doubles.fake_engine import FakeEngine

from serving.http.app import create_app
from serving.http.wire.uvicorn_server import (
    AnnouncingServer,
    bind,
    bind_unix,
    let_next_bind,
    uvicorn_config,
)


def test_headers_over_the_limit_are_refused_and_the_server_goes_on(client):
    url = client.base_url
    with socket.create_connection((url.host, url.port), timeout=60) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Big: ")
        try:
            for _ in range(64):
                sock.sendall(b"a" * 16384)
            answer = sock.recv(4096)
        except ConnectionError:
            answer = b" 400 "
        assert b" 400 " in answer or answer == b""
    assert client.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
    ],
)
def test_ambiguous_lengths_do_not_smuggle_a_request(client, head):
    """h11 refuses them or reads one message; a hidden second request never gets an answer."""
    url = client.base_url
    hidden = b"0\r\n\r\nGET /version HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection((url.host, url.port), timeout=60) as sock:
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n" + hidden)
        sock.settimeout(1)
        answer = b""
        try:
            while chunk := sock.recv(4096):
                answer += chunk
        except TimeoutError:
            pass
    assert b'"version"' not in answer


def test_no_server_header(client):
    assert "server" not in client.get("/health").headers


def test_bind_takes_a_port_without_listening():
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    sock.listen()
    with pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", port)
    sock.close()


def test_a_port_is_taken_while_its_server_starts_and_free_when_it_has_ended():
    """Two servers that start at once would find out when both have loaded their models."""
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", port)
    let_next_bind(first)
    first.listen()
    with pytest.raises(OSError, match="in use"):
        bind("127.0.0.1", port)
    with socket.create_connection(("127.0.0.1", port)):
        first.accept()[0].close()  # the side that ends first keeps the port for a minute
    first.close()
    bind("127.0.0.1", port).close()


def test_announcement_comes_when_connections_are_accepted():
    sock = bind("127.0.0.1", 0)
    seen = []

    def announce() -> None:
        with socket.create_connection(sock.getsockname(), timeout=60):
            seen.append(True)
        server.should_exit = True

    server = AnnouncingServer(uvicorn_config(create_app(FakeEngine())), announce)
    asyncio.run(server.serve(sockets=[sock]))
    assert seen == [True]


def test_a_unix_socket_is_the_owner_s_and_a_dead_one_is_replaced(tmp_path):
    path = str(tmp_path / "s")
    first = bind_unix(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    first.listen()
    with pytest.raises(OSError, match="another process listens"):
        bind_unix(path)
    first.close()
    bind_unix(path).close()


def test_a_file_is_not_taken_for_a_socket(tmp_path):
    (tmp_path / "s").write_text("kept")
    with pytest.raises(OSError, match="in use"):
        bind_unix(str(tmp_path / "s"))
    assert (tmp_path / "s").read_text() == "kept"
