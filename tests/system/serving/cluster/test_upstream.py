"""One exchange over a Unix socket, with an instance that answers, breaks off, or is not there."""

import asyncio
import contextlib
import socket

import pytest

from serving.cluster import upstream
from serving.cluster.upstream import UpstreamBroken, UpstreamDown, UpstreamSlow

HEADERS = [
    (b"host", b"front"),
    (b"authorization", b"Bearer key"),
    (b"connection", b"keep-alive"),
    (b"content-length", b"999"),
]


@contextlib.asynccontextmanager
async def instance(path, answer: bytes, seen: list[bytes]):
    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        seen.append(head + await reader.readexactly(length))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(handle, path)
    async with server:
        yield


def exchange(path, answer, body=b"{}"):
    """Return (what the instance saw, status, headers, body)."""

    async def run():
        seen = []
        async with instance(path, answer, seen):
            found = await upstream.send(str(path), "POST", b"/v1/x?a=1", HEADERS, body)
            try:
                content = b"".join([part async for part in found.body()])
            finally:
                await found.close()
        return seen[0], found.status, found.headers, content

    return asyncio.run(run())


def test_a_request_goes_through_and_its_answer_comes_back(tmp_path):
    answer = b"HTTP/1.1 201 Created\r\ncontent-length: 5\r\nx-request-id: 7\r\n\r\nhello"
    seen, status, headers, content = exchange(tmp_path / "s", answer, b'{"a": 1}')
    assert seen.startswith(b"POST /v1/x?a=1 HTTP/1.1\r\n")
    assert b"authorization: Bearer key" in seen
    assert seen.endswith(b'\r\n\r\n{"a": 1}')
    assert b"999" not in seen
    assert b"front" not in seen
    assert (status, content) == (201, b"hello")
    assert (b"x-request-id", b"7") in headers


def test_chunks_come_without_their_frame(tmp_path):
    answer = (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
    )
    _, _, headers, content = exchange(tmp_path / "s", answer, b"")
    assert content == b"onetwo"
    assert not [name for name, _ in headers if name == b"transfer-encoding"]


def test_an_answer_that_is_cut_off_is_an_error(tmp_path):
    with pytest.raises(UpstreamBroken, match="broke off"):
        exchange(tmp_path / "s", b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello")


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 2", b"nonsense\r\n\r\n"])
def test_no_answer_is_an_instance_that_broke_off(tmp_path, answer):
    with pytest.raises(UpstreamBroken, match="broke off"):
        exchange(tmp_path / "s", answer)


def test_an_early_answer_to_a_large_body_is_read(tmp_path):
    """The instance answers and closes while most of the body is still to be sent."""

    async def run():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Large\r\ncontent-length: 5\r\n\r\nlarge")
            await writer.drain()
            writer.close()

        path = str(tmp_path / "s")
        async with await asyncio.start_unix_server(handle, path):
            for _ in range(20):
                found = await upstream.send(path, "POST", b"/", [], b"x" * (15 << 20))
                assert (found.status, await found.whole()) == (413, b"large")
                await found.close()

    asyncio.run(run())


def test_an_instance_that_says_nothing_is_slow(tmp_path):
    async def run():
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(tmp_path / "s"))
            sock.listen()
            await upstream.send(str(tmp_path / "s"), "GET", b"/", [], b"", head_s=0.05)

    with pytest.raises(UpstreamSlow, match="not answered for"):
        asyncio.run(run())


def test_nobody_is_there(tmp_path):
    with pytest.raises(UpstreamDown, match="cannot be reached"):
        asyncio.run(upstream.send(str(tmp_path / "s"), "GET", b"/", [], b""))


def test_a_connection_that_is_given_up_is_closed(tmp_path, monkeypatch):
    made = []
    new_socket = upstream.new_socket

    def noted(address):
        sock, where = new_socket(address)
        made.append(sock)
        return sock, where

    async def run():
        loop = asyncio.get_running_loop()

        async def hang(sock, where):
            await asyncio.Event().wait()

        monkeypatch.setattr(loop, "sock_connect", hang)
        task = asyncio.create_task(upstream.send(str(tmp_path / "s"), "GET", b"/", [], b""))
        while not made:
            await asyncio.sleep(0.001)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    monkeypatch.setattr(upstream, "new_socket", noted)
    asyncio.run(run())
    assert made[0].fileno() == -1
