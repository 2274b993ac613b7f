"""Pieces of an answer's body on the connection at once, past the layers around the application.

Those look at the beginning and the end of an answer, which take the long way. For a piece that way
costs the event loop more than all else: a dozen coroutines, and the wake-up of a task.
"""

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from serving.http.wire.quick_connection import chunk

_NAME = "lora_jax.body_writer"  # among the scope's extensions


class BodyWriter(Protocol):
    """Way out of an answer's body that needs no waiting."""

    @property
    def is_ready(self) -> bool:
        """True if the answer has begun and goes on, in chunks, and the client reads."""
        ...

    def write(self, data: bytes) -> None:
        """Send what is not empty, as `http.response.body` with `more_body` does; when ready."""
        ...


class CycleWriter:
    """Writer of one answer of uvicorn's, whose connection is a QuickConnection."""

    def __init__(self, cycle: Any):
        # Weakly, as its scope holds this: a request is to leave nothing for the collector.
        self._cycle, self._flow, self._connection = weakref.ref(cycle), cycle.flow, cycle.conn
        self._write = cycle.transport.write

    @property
    def is_ready(self) -> bool:
        """True if the answer has begun and goes on, in chunks, and the client reads."""
        cycle = self._cycle()
        if cycle is None or self._flow.write_paused:
            return False
        if cycle.disconnected or cycle.response_complete:
            return False
        return cycle.response_started and self._connection.is_in_chunks

    def write(self, data: bytes) -> None:
        """Send what is not empty, as `http.response.body` with `more_body` does; when ready."""
        self._write(chunk(data))


def offer(cycle: Any) -> None:
    """Let the application of a cycle have a writer."""
    if cycle.scope["method"] != "HEAD":
        cycle.scope.setdefault("extensions", {})[_NAME] = CycleWriter(cycle)


def body_writer(scope: Mapping[str, Any]) -> BodyWriter | None:
    """Return the writer of a request's answer; None where its server has none."""
    return scope.get("extensions", {}).get(_NAME)
