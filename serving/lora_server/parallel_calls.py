"""Calls over one connection of which several are under way. No jax.

They are JSON, as those of `calls`, with a number. Answers come in the order in which calls end.
"""

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from serving.lora_server.calls import answer, shut_down, value_of


class ParallelCaller:
    """One end of a connection; any thread may call, and waits for its own answer alone."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._lock = threading.Lock()  # the fields below, and the bytes that are sent
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._ended: Exception | None = None
        self._thread = threading.Thread(target=self._receive, name="parallel-calls", daemon=True)
        self._thread.start()

    def call(self, name: str, *arguments: Any) -> Any:
        """Return what the other side's function returns, or raise what it raises.

        Raises ConnectionError when the connection ends before the answer. No time bounds the call.
        """
        try:
            said = self._sent(name, arguments).result()
        except (EOFError, OSError) as error:
            raise ConnectionError(f"The other process has gone: {error}") from error
        return value_of(said)

    def close(self) -> None:
        """End the connection; calls under way raise ConnectionError."""
        with self._lock:
            if self._ended is None:
                with contextlib.suppress(OSError):
                    shut_down(self._connection.fileno())
        self._thread.join()

    def _sent(self, name: str, arguments: tuple[Any, ...]) -> Future[dict[str, Any]]:
        """Send a call; return its answer, which comes or is an error when the connection ends."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._ended is not None:
                raise EOFError(str(self._ended))
            number = next(self._numbers)
            self._waiting[number] = future
            self._connection.send_bytes(json.dumps([number, name, *arguments]).encode())
        return future

    def _receive(self) -> None:
        try:
            while True:
                number, said = json.loads(self._connection.recv_bytes())
                with self._lock:
                    future = self._waiting.pop(number)
                future.set_result(said)
        except (EOFError, OSError, ValueError, KeyError) as error:
            with self._lock:
                self._ended = error
                self._connection.close()
                waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                future.set_exception(EOFError(str(error)))


def answer_in_parallel(
    connection: Connection, functions: Mapping[str, Callable[..., Any]], at_once: int
) -> threading.Thread:
    """Answer calls, up to `at_once` side by side, on a thread until the other side is closed."""
    sending = threading.Lock()

    def run(number: int, name: str, arguments: list[Any]) -> None:
        said = json.dumps([number, answer(functions, name, arguments)]).encode()
        with sending, contextlib.suppress(OSError):  # the other side has gone
            connection.send_bytes(said)

    def receive() -> None:
        pool = ThreadPoolExecutor(at_once, thread_name_prefix="parallel-answer")
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, name, *arguments = json.loads(connection.recv_bytes())
                pool.submit(run, number, name, arguments)
        pool.shutdown(wait=False, cancel_futures=True)

    thread = threading.Thread(target=receive, name="parallel-answers", daemon=True)
    thread.start()
    return thread
