"""Connections that cost little: deadlines, a limit, and an end for clients that do not read.

uvicorn waits for ever for a request's head, and for a client to read its answer.
"""

import asyncio
import dataclasses
import logging
import os
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from serving.http.wire.body_writer import offer
from serving.http.wire.quick_connection import QuickConnection

logger = logging.getLogger(__name__)

_SPARE = 16  # connections above the limit, which are answered when they ask for a probe
_RESERVE = 96  # descriptors for files and for connections of our own
_QUIET_S = 10.0  # between two lines about the same trouble
_BUSY = b'{"error":{"message":"Too many connections.","type":"ServiceUnavailableError","code":503}}'
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
    b"connection: close\r\ncontent-length: " + str(len(_BUSY)).encode() + b"\r\n\r\n" + _BUSY
)
_PROBES = ("/health", "/live", "/ping", "/ready", "/metrics")


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits of a connection; times are seconds."""

    most: int = 1000
    head_s: float = 15.0  # for request line and headers, from the first byte or the connection on
    body_s: float = 60.0  # for a body; the routes that read one have a deadline of their own
    stuck_s: float = 30.0  # without a byte read by the client while bytes wait for it


def fitting(limits: ConnectionLimits, per_connection: int = 1) -> ConnectionLimits:
    """Return limits that the process' descriptors suffice for; the soft limit is raised first.

    `per_connection` descriptors belong to one connection.
    """
    used = len(os.listdir("/proc/self/fd")) + _RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = used + (limits.most + _SPARE) * per_connection
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return limits
    most = max(1, (soft - used) // per_connection - _SPARE)
    logger.warning(
        "At most %d connections at a time instead of %d: this process may open %d files.",
        most,
        limits.most,
        soft,
    )
    return dataclasses.replace(limits, most=most)


class BoundedH11(H11Protocol):
    """One connection; `limits` is a class attribute, see `bounded`."""

    limits = ConnectionLimits()
    _said_s = 0.0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn = QuickConnection(
            h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_event_size or 65536
        )
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self._is_extra = False
        self.idle_since = 0.0  # of the loop; 0: a request is under way

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        if len(self.connections) <= self.limits.most:
            return
        local = [c for c in self.connections if _is_here(c.transport)]
        if len(local) <= self.limits.most:
            return
        self._complain("%d connections are open, the limit is %d.", len(local))
        idle = [c for c in local if c is not self and _idle_since(c)]
        if idle:
            min(idle, key=_idle_since).transport.abort()
        elif len(local) > self.limits.most + _SPARE:
            transport.write(_REFUSAL)
            transport.close()
        else:
            self._is_extra = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        super().connection_lost(exc)
        self._cancel_stuck()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._follow()

    def handle_events(self) -> None:
        app = self.app
        if self._is_extra:
            self.app = _probes_only(app)
        before = self.cycle
        super().handle_events()
        self.app = app
        if self.cycle is not None and self.cycle is not before:  # its task has not begun
            offer(self.cycle)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_stuck()

    def _follow(self) -> None:
        """Have the deadline of what the client is to send next, and to read."""
        waiting = self.transport.get_write_buffer_size()
        if waiting and self._stuck is None:
            self._watch_reader(waiting)
        if self.transport.is_closing():
            self._cancel_deadline()
            return
        state, answered = self.conn.their_state, self.cycle is None or self.cycle.response_complete
        if state is h11.IDLE or (answered and state is h11.DONE):
            if not self.idle_since:
                self._wait_for_head()
        elif state is h11.SEND_BODY:
            if self.idle_since or self._deadline is None:
                self._set_deadline(self.limits.body_s)
            self.idle_since = 0.0
        else:
            self._cancel_deadline()
            self.idle_since = 0.0

    def _wait_for_head(self) -> None:
        self.idle_since = self.loop.time() or 1e-9
        self._set_deadline(self.limits.head_s)

    def _set_deadline(self, seconds: float) -> None:
        self._cancel_deadline()
        self._deadline = self.loop.call_later(seconds, self._too_late)

    def _too_late(self) -> None:
        self._deadline = None
        logger.debug("A connection was closed: the client sent too slowly.")
        self.transport.abort()

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _watch_reader(self, waiting: int) -> None:
        """Look again later whether the client has read any of the bytes that wait for it."""
        self._cancel_stuck()

        def look() -> None:
            now = self.transport.get_write_buffer_size()
            self._stuck = None
            if now < waiting:
                if now:
                    self._watch_reader(now)
                return
            logger.info(
                "A client has read nothing for %g s; its connection is closed.", self.limits.stuck_s
            )
            self.transport.abort()

        self._stuck = self.loop.call_later(self.limits.stuck_s, look)

    def _cancel_stuck(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _complain(self, text: str, count: int) -> None:
        now = time.monotonic()
        if now - type(self)._said_s > _QUIET_S:
            type(self)._said_s = now
            logger.warning(text, count, self.limits.most)


def bounded(limits: ConnectionLimits) -> type[BoundedH11]:
    """Return the protocol with these limits."""
    return type("LimitedH11", (BoundedH11,), {"limits": limits, "_said_s": 0.0})


def log_descriptors(loop: asyncio.AbstractEventLoop) -> None:
    """Let the loop say in one line, not too often, that it could not accept a connection."""
    said_s = -_QUIET_S

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal said_s
        if "out of system resource" not in str(context.get("message")):
            loop.default_exception_handler(context)
        elif time.monotonic() - said_s >= _QUIET_S:
            said_s = time.monotonic()
            logger.error("No connection can be accepted: %s.", context.get("exception"))

    loop.set_exception_handler(handle)


def _is_here(transport: Any) -> bool:
    """Return whether a connection keeps its descriptor beyond this turn of the loop."""
    return not transport.is_closing() or transport.get_write_buffer_size() > 0


def _idle_since(connection: Any) -> float:
    return getattr(connection, "idle_since", 0.0)


def _probes_only(app: Any) -> Any:
    """Return an application that refuses everything but a question of how the server is."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in _PROBES:
            await app(scope, receive, send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(_BUSY)).encode()),
            (b"retry-after", b"1"),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": _BUSY})

    return answer
