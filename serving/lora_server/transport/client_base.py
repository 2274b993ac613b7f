"""A client that comes to its servers one by one, and again to those that it has lost."""

import abc
from collections.abc import Callable, Sequence

from serving.lora_server.transport.base import AbstractClient, TransportError
from serving.lora_server.transport.shapes import Shapes

FIRST_LIMIT = 0.02  # seconds for a wait, until somebody has measured


class AbstractConnector[Joined](abc.ABC):
    """Function that joins a client to one server; `Joined` is its handle."""

    @abc.abstractmethod
    def join(self, last_epoch: int) -> Joined:
        """Return a channel under an epoch above `last_epoch`. Raises TransportError."""

    @abc.abstractmethod
    def watch(self, joined: Joined, lost: Callable[[], None]) -> None:
        """Call `lost()` once when the server of `joined` has gone, if that can be told."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Tell the server that this client has gone. A second call does nothing."""


class AbstractClientBase[Joined](AbstractClient):
    """Client base of all transports, for any kind of slot memory."""

    def __init__(self, shapes: Shapes, connectors: Sequence[AbstractConnector[Joined]]):
        self.shapes, self.servers = shapes, len(connectors)
        self._connectors, self._epochs = list(connectors), [0] * len(connectors)
        self._closed = False

    def set_limit(self, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"a wait must be bounded by more than 0 seconds, got {seconds}")
        self._limit(int(seconds * 1e9))

    def rejoin(self) -> tuple[int, ...]:
        for server in () if self._closed else self.lost():
            try:
                self._join(server)
            except TransportError:
                continue
        return self.lost()

    def _join_all(self, *, late: bool = False) -> None:
        """Join every server. Raises TransportError, with nothing kept, if one is not there.

        Those that come `late` are lost until a `rejoin`.
        """
        self.set_limit(FIRST_LIMIT)
        if late:
            return
        try:
            for server in range(self.servers):
                self._join(server)
        except BaseException:
            self.close()
            raise

    @abc.abstractmethod
    def _limit(self, nanoseconds: int) -> None:
        """Bound every wait from now on."""

    @abc.abstractmethod
    def _join(self, server: int) -> None:
        """Come to a server, once more if need be. Raises TransportError."""
