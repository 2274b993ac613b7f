"""Calls between the processes of a LoRA Server: JSON, one answer per call. No jax.

Nothing that comes in is executed or unpickled: a call names one of a few functions, with numbers
and text as arguments.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Protocol

from serving.lora_server.coordinator import Coordinator, Lease, NoRoom
from serving.lora_server.lease_metrics import PartLoad

_ERRORS = {error.__name__: error for error in (ValueError, NoRoom, ConnectionError)}
_LIMIT_S = 60.0  # for an answer: an adapter's files may have to be read first


class Caller:
    """One end of a connection; any thread may call, one call at a time is under way."""

    def __init__(self, connection: Connection, limit_s: float = _LIMIT_S):
        """`limit_s` bounds the wait for an answer; the connection is closed when it is over."""
        self._connection, self._limit_s = connection, limit_s
        self._lock = threading.Lock()
        self._closing = threading.Lock()  # a descriptor closed twice is another's the second time

    def call(
        self,
        name: str,
        *arguments: Any,
        limit_s: float | None = None,
        wait: Callable[[Callable[[float], bool], float], bool] | None = None,
    ) -> Any:
        """Return what the other side's function returns, or raise what it raises.

        `limit_s` bounds this wait. `wait`, given a function that waits for the answer and the
        limit, returns whether it came. Raises ConnectionError when nobody answers (in time).
        """
        limit_s = self._limit_s if limit_s is None else limit_s
        with self._lock:
            try:
                self._connection.send_bytes(json.dumps([name, *arguments]).encode())
                poll = self._connection.poll
                if not (poll(limit_s) if wait is None else wait(poll, limit_s)):
                    raise EOFError(f"no answer to {name} within {limit_s} s")
                said = json.loads(self._connection.recv_bytes())
            except (EOFError, OSError, ValueError) as error:
                self._close()
                raise ConnectionError(f"The other process has gone: {error}") from error
        return value_of(said)

    def close(self) -> None:
        """Close the connection, which ends the other side's `answer_calls` and a call under way.

        That one is waited for: behind a descriptor that is closed the next process may be found,
        for whose answer it would wait.
        """
        with self._closing:
            if not self._connection.closed:
                shut_down(self._connection.fileno())
        with self._lock:
            self._close()

    def _close(self) -> None:
        with self._closing:
            self._connection.close()


def shut_down(descriptor: int) -> None:
    """Let both sides of a connection read its end, and leave the descriptor open."""
    with socket.socket(fileno=os.dup(descriptor)) as end, contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)  # fails where the other side was faster


def answer_calls(connection: Connection, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Answer calls of these functions until the other side closes the connection."""
    while True:
        try:
            name, *arguments = json.loads(connection.recv_bytes())
            said = answer(functions, name, arguments)
            connection.send_bytes(json.dumps(said).encode())
        except (EOFError, OSError):
            return


def answer(
    functions: Mapping[str, Callable[..., Any]], name: str, arguments: list[Any]
) -> dict[str, Any]:
    """Return what a call gives or raises, as `value_of` takes it."""
    if name not in functions:
        return {"error": "ValueError", "text": f"There is no call {name!r}."}
    try:
        return {"value": functions[name](*arguments)}
    except Exception as error:
        kinds = [n for n, kind in _ERRORS.items() if isinstance(error, kind)]
        return {"error": kinds[0] if kinds else "RuntimeError", "text": str(error)}


def value_of(said: dict[str, Any]) -> Any:
    """Return the value of an answer, or raise its error."""
    if "error" in said:
        raise _ERRORS.get(said["error"], RuntimeError)(said["text"])
    return said["value"]


def serve_leases(source: Coordinator, instance: str, connection: Connection) -> threading.Thread:
    """Answer an instance's calls for leases on a thread, until its connection ends.

    Then all of its leases are given back. None is waited for: others may be asked for meanwhile.
    """

    def lease(name: str, digest: str, folder: str) -> list[int] | None:
        granted = source.request(name, digest, folder)
        return None if granted is None else [granted.number, granted.version]

    functions = {"lease": lease, "release": source.release, "leave": source.leave}

    def run() -> None:
        try:
            answer_calls(connection, functions)
        finally:
            source.leave(instance)

    thread = threading.Thread(target=run, name=f"leases-of-{instance}", daemon=True)
    thread.start()
    return thread


class ParallelCalls(Protocol):
    """Part of parallel_calls.ParallelCaller that is used here."""

    limit_s: float

    def call(self, name: str, *arguments: Any) -> Any: ...


class RemoteRank:
    """A rank in another process, as the coordinator sees it."""

    def __init__(self, caller: Caller, parallel: ParallelCalls):
        """`parallel` is for calls that may be under way beside others."""
        self._caller, self._parallel = caller, parallel

    def fetch(self, folder: str, digest: str) -> PartLoad:
        """See server.RankServer.fetch; ValueError also when the files are not read in time."""
        try:
            return PartLoad(*self._parallel.call("fetch", folder, digest))
        except TimeoutError:
            raise ValueError(
                "The LoRA Server has not read the adapter's files in "
                f"{self._parallel.limit_s:g} s: look at the disk of its host, then ask again."
            ) from None

    def forget(self, digest: str) -> None:
        """See server.RankServer.forget."""
        try:
            self._parallel.call("forget", digest)
        except TimeoutError as error:
            raise ConnectionError(f"A rank of the LoRA Server does not answer: {error}") from error

    def load(self, number: int, folder: str, digest: str, version: int) -> PartLoad:
        """See server.RankServer.load."""
        return PartLoad(*self._caller.call("load", number, folder, digest, version))

    def unload(self, number: int, version: int) -> None:
        """See server.RankServer.unload."""
        self._caller.call("unload", number, version)


class RemoteLeases:
    """The coordinator in another process, as an instance sees it."""

    def __init__(self, caller: Caller):
        self._caller = caller

    def lease(self, instance: str, digest: str, folder: str) -> Lease:
        """See coordinator.Coordinator.lease; NoRoom also while the adapter is on its way."""
        granted = self._caller.call("lease", instance, digest, folder)
        if granted is None:
            raise NoRoom("The adapter is on its way to the LoRA Server.")
        return Lease(*granted)

    def release(self, instance: str, digest: str) -> None:
        """See coordinator.Coordinator.release."""
        self._caller.call("release", instance, digest)

    def leave(self, instance: str) -> None:
        """See coordinator.Coordinator.leave."""
        self._caller.call("leave", instance)
