"""Calls of rank 0 to other nodes, whose agents start roles, and news of a lost node. No jax."""

import abc
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from serving.runtime.gang_stream import BEAT_S, Connection

# Longer than between members of an instance: keepers find a hung process sooner, and here a busy
# machine's late beat would cost all roles of a node.
SILENT_S = 12.0


class AbstractNode(abc.ABC):
    """A host that starts roles, as rank 0 sees it; any thread may call."""

    address: str  # numeric, for the other nodes

    @abc.abstractmethod
    def call(self, start: int, method: str, *arguments: Any) -> Future[Any]:
        """Return what `agent.Starts.call` will return there.

        Its exception is a ConnectionError, also where the node is lost meanwhile.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End the node's agent and all that it has started."""


class FarNode(AbstractNode):
    """A node at the other side of a connection on which it has proven itself."""

    def __init__(self, connection: Connection, address: str, lost: Callable[[str], None]):
        """Own the connection. `lost` is told why once, before calls under way fail."""
        self.address, self._connection, self._lost = address, connection, lost
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._under_way: dict[int, Future[Any]] = {}
        self._why: str | None = None
        self._ended = threading.Event()
        for run in (self._listen, self._beat):
            threading.Thread(target=run, name="node", daemon=True).start()

    def call(self, start: int, method: str, *arguments: Any) -> Future[Any]:
        """See AbstractNode."""
        future: Future[Any] = Future()
        with self._lock:
            number, why = next(self._numbers), self._why
            if why is None:
                self._under_way[number] = future
        if why is not None:
            future.set_exception(ConnectionError(why))
            return future
        self._send((number, start, method, arguments))
        return future

    def close(self) -> None:
        """See AbstractNode."""
        self._send(None)
        self._end("this command ends")

    def _send(self, value: Any) -> None:
        try:
            with self._sending:
                self._connection.send(value)
        except OSError as error:
            self._end(str(error))

    def _listen(self) -> None:
        """Take answers, and notice the node's end and its silence."""
        try:
            while True:
                is_beat, value = self._connection.receive(SILENT_S)
                if not is_beat:
                    self._take_in(*value)
        except Exception as error:  # whatever it is, no more is heard
            self._end(str(error))

    def _take_in(self, number: int, why: str | None, result: Any) -> None:
        with self._lock:
            future = self._under_way.pop(number, None)
        if future is None:
            return
        if why is None:
            future.set_result(result)
        else:
            future.set_exception(ConnectionError(why))

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            try:
                with self._sending:
                    self._connection.beat(serving=True)
            except OSError as error:
                self._end(str(error))

    def _end(self, why: str) -> None:
        with self._lock:
            if self._why is not None:
                return
            self._why = why
            left, self._under_way = list(self._under_way.values()), {}
        self._ended.set()
        self._connection.close()
        self._lost(why)
        for future in left:
            future.set_exception(ConnectionError(why))
