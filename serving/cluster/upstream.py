"""One HTTP exchange with an instance over its Unix socket, streamed. No jax."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import h11

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
}
_READ = 1 << 16


class UpstreamDown(ConnectionError):
    """The instance did not answer; nothing of its answer has been seen."""


class Upstream:
    """A request that was sent, and its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the answer's body as it comes. Raises ConnectionError when it is cut off."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return

    def close(self) -> None:
        """Close the connection; the instance then aborts what it still does for it."""
        self._writer.close()

    async def _send(self, method: str, target: bytes, headers: Headers, body: bytes) -> None:
        kept = [(name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP]
        length = str(len(body)).encode()
        kept += [(b"host", b"instance"), (b"connection", b"close"), (b"content-length", length)]
        request = h11.Request(method=method, target=target, headers=kept)
        data = self._http.send(request) or b""
        data += self._http.send(h11.Data(body)) or b"" if body else b""
        self._writer.write(data + (self._http.send(h11.EndOfMessage()) or b""))
        await self._writer.drain()

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
                    self._http.receive_data(await self._reader.read(_READ))
                elif isinstance(event, h11.Event):
                    return event
                else:
                    raise ConnectionError("The instance ended its answer early.")
        except h11.RemoteProtocolError as error:
            raise ConnectionError(f"The instance broke off: {error}") from error


async def send(path: str, method: str, target: bytes, headers: Headers, body: bytes) -> Upstream:
    """Send a request to the instance at the socket `path`; return when its headers are here.

    Raises UpstreamDown when it cannot be reached or breaks off before.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        raise UpstreamDown(f"The instance cannot be reached: {error}") from error
    upstream = Upstream(reader, writer)
    try:
        await upstream._send(method, target, headers, body)
        await upstream._receive_head()
    except OSError as error:
        upstream.close()
        raise UpstreamDown(f"The instance did not answer: {error}") from error
    except BaseException:
        upstream.close()
        raise
    return upstream
