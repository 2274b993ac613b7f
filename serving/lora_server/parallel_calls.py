"""Calls over one connection of which several are under way. No jax.

They are JSON, as those of `calls`, with a number. Answers come in the order in which calls end.
"""

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from multiprocessing.connection import Connection
from typing import Any

from serving.lora_server.calls import answer, shut_down, value_of

_LIMIT_S = 300.0  # for an answer: an adapter's files are read from a slow disk, after others'


class ParallelCaller:
    """One end of a connection; any thread may call, and waits for its own answer alone."""

    def __init__(self, connection: Connection, limit_s: float = _LIMIT_S):
        """`limit_s` bounds the wait for an answer."""
        self._connection, self.limit_s = connection, limit_s
        self._lock = threading.Lock()  # the fields below, and the bytes that are sent
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._ended: Exception | None = None
        self._thread = threading.Thread(target=self._receive, name="parallel-calls", daemon=True)
        self._thread.start()

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what the other side's function returns, or raise what it raises.

        Raises ConnectionError when the connection ends before the answer, and TimeoutError when no
        answer comes in time: other calls go on, and a late answer is dropped.
        """
        try:
            number, said = self._sent(name, arguments)
            wait([said], self.limit_s)
            if self._given_up(number):
                raise TimeoutError(f"no answer to {name} within {self.limit_s:g} s")
            answered = said.result()
        except TimeoutError:
            raise
        except (EOFError, OSError) as error:
            raise ConnectionError(f"The other process has gone: {error}") from error
        return value_of(answered)

    def close(self) -> None:
        """End the connection; calls under way raise ConnectionError."""
        with self._lock:
            if self._ended is None:
                with contextlib.suppress(OSError):
                    shut_down(self._connection.fileno())
        self._thread.join()

    def _given_up(self, number: int) -> bool:
        """Wait for this answer no longer; False: it has come, or the connection has ended."""
        with self._lock:
            return self._waiting.pop(number, None) is not None

    def _sent(self, name: str, arguments: tuple[Any, ...]) -> tuple[int, Future[dict[str, Any]]]:
        """Send a call; return its number and its answer, or an error if the connection ends."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._ended is not None:
                raise EOFError(str(self._ended))
            number = next(self._numbers)
            self._waiting[number] = future
            self._connection.send_bytes(json.dumps([number, name, *arguments]).encode())
        return number, future

    def _receive(self) -> None:
        try:
            while True:
                number, said = json.loads(self._connection.recv_bytes())
                with self._lock:
                    future = self._waiting.pop(number, None)
                if future is not None:
                    future.set_result(said)
        except (EOFError, OSError, ValueError, TypeError) as error:
            with self._lock:
                self._ended = error
                self._connection.close()
                waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                future.set_exception(EOFError(str(error)))


def answer_in_parallel(
    connection: Connection, functions: Mapping[str, Callable[..., Any]]
) -> threading.Thread:
    """Answer calls, each on a thread of its own, on a thread until the other side is closed.

    The other side bounds how many are under way. One that never ends delays no other.
    """
    sending = threading.Lock()

    def run(number: int, name: str, arguments: list[Any]) -> None:
        said = json.dumps([number, answer(functions, name, arguments)]).encode()
        with sending, contextlib.suppress(OSError):  # the other side has gone
            connection.send_bytes(said)

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, name, *arguments = json.loads(connection.recv_bytes())
                call = number, name, arguments
                threading.Thread(
                    target=run, args=call, name=f"parallel-answer-{number}", daemon=True
                ).start()

    thread = threading.Thread(target=receive, name="parallel-answers", daemon=True)
    thread.start()
    return thread
