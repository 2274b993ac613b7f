"""One HTTP exchange with an instance over its Unix socket or port, streamed. No jax.

The answer is read while the request is still being sent: an instance that refuses a large body
answers early and closes, and its answer counts, not the broken pipe.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence

import h11

from serving.cluster.addresses import HEADER, Address, headers_of, new_socket

Headers = Sequence[tuple[bytes, bytes]]
_HOP_BY_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"content-length",
    b"host",
    b"expect",
    HEADER,
}
_READ = 1 << 16
_CONNECT_S = 2.0
HEAD_S = 3600.0  # until the head of an answer: a long text that is not streamed


class UpstreamDown(ConnectionError):
    """The instance cannot be reached; nothing was sent to it."""


class UpstreamBroken(ConnectionError):
    """The instance has the request, or a part of it, and its answer will never be whole."""


class UpstreamSlow(ConnectionError):
    """The head of the answer has not come in time."""


class Upstream:
    """A request that is being sent, and its answer."""

    def __init__(self, sock: socket.socket, own_headers: Headers = ()):
        self._own_headers = own_headers
        self._sock, self._loop = sock, asyncio.get_running_loop()
        self._http = h11.Connection(h11.CLIENT)
        self._sending: asyncio.Task[None] | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the answer's body as it comes. Raises UpstreamBroken when it is cut off."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return

    async def whole(self) -> bytes:
        """Return the answer's whole body. Raises UpstreamBroken when it is cut off."""
        return b"".join([part async for part in self.body()])

    async def close(self) -> None:
        """Close the connection; the instance then aborts what it still does for it."""
        try:
            if self._sending is not None:
                self._sending.cancel()
                await asyncio.wait({self._sending})
        finally:
            self._sock.close()

    def _send(self, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        kept = [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
        kept += self._own_headers
        length = str(len(body)).encode()
        kept += [(b"host", b"instance"), (b"connection", b"close"), (b"content-length", length)]
        head = self._http.send(h11.Request(method=method, target=target, headers=kept)) or b""
        if body:
            self._http.send_with_data_passthrough(h11.Data(body))
        self._http.send(h11.EndOfMessage())
        self._sending = asyncio.create_task(self._write(head, body))

    async def _write(self, head: bytes, body: bytes) -> None:
        with contextlib.suppress(OSError):  # an early answer; reading tells
            first = body[:_READ]  # most bodies go with the head
            await self._loop.sock_sendall(self._sock, head + first)
            if len(body) > len(first):
                await self._loop.sock_sendall(self._sock, memoryview(body)[len(first) :])

    async def _receive_head(self) -> None:
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                self.status = event.status_code
                raw = [(bytes(name), bytes(value)) for name, value in event.headers]
                hop = _HOP_BY_HOP - {b"content-length"}
                self.headers = [(n, v) for n, v in raw if n.lower() not in hop]
                return

    async def _next(self) -> h11.Event:
        try:
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    self._http.receive_data(await self._loop.sock_recv(self._sock, _READ))
                elif isinstance(event, h11.Event):
                    return event
                else:
                    raise UpstreamBroken("The instance ended its answer early.")
        except (h11.RemoteProtocolError, OSError) as error:
            raise UpstreamBroken(f"The instance broke off: {error}") from error


async def send(
    address: Address,
    method: str,
    target: bytes,
    headers: Headers,
    body: bytes,
    head_s: float = HEAD_S,
) -> Upstream:
    """Send a request to the instance at the address; return when the answer's head is here.

    Raises UpstreamDown, UpstreamBroken or UpstreamSlow.
    """
    sock, own = await _connect(address), headers_of(address)
    return await send_over(sock, method, target, headers, body, head_s, own_headers=own)


async def send_over(
    sock: socket.socket,
    method: str,
    target: bytes,
    headers: Headers,
    body: bytes,
    head_s: float = HEAD_S,
    *,
    own_headers: Headers = (),
) -> Upstream:
    """Send a request over a connection, which it closes in the end; see `send`.

    `own_headers` are the front's own, for the instance.
    """
    sock.setblocking(False)
    upstream = Upstream(sock, own_headers)
    try:
        upstream._send(method, target, headers, body)
        async with asyncio.timeout(head_s):
            await upstream._receive_head()
    except TimeoutError:
        await upstream.close()
        raise UpstreamSlow(f"The instance has not answered for {head_s:g} s.") from None
    except BaseException:
        await upstream.close()
        raise
    return upstream


async def _connect(address: Address) -> socket.socket:
    sock, where = new_socket(address)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(_CONNECT_S):
            await asyncio.get_running_loop().sock_connect(sock, where)
    except OSError as error:  # TimeoutError is one
        sock.close()
        raise UpstreamDown(f"The instance cannot be reached: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock
