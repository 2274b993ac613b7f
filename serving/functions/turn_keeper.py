"""Grants functions their turns on the device, over a socket to each. No jax.

A function's death ends its socket, and with it its turn. What another says of its work, or does not
say, costs others no more than the limits of `turn_table`.
"""

import contextlib
import logging
import math
import selectors
import socket
import struct
import threading
import time

from serving.functions.short_switches import short_switches
from serving.functions.turn_table import Ask, TurnTable

logger = logging.getLogger(__name__)

ASK, BACK, GRANT, RECALL = b"a", b"b", b"g", b"r"
ASK_FIELDS = struct.Struct("<c4d")  # with those of Ask
_LONGEST = 64


class TurnKeeper:
    """The turns of one device, on a thread of its own; any thread may call."""

    def __init__(self, table: TurnTable | None = None):
        self._table = table or TurnTable()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._sockets: dict[str, socket.socket] = {}
        self._num_opened = 0
        self._closing = False
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="turns", daemon=True)
        self._thread.start()

    def open(self, name: str) -> socket.socket:
        """Return the end of a new process of the function, for the caller to pass on and close."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with self._lock:
            self._num_opened += 1
            key = f"{name} {self._num_opened}"  # of the process
            self._sockets[key] = ours
            self._selector.register(ours, selectors.EVENT_READ, key)
        self._wake.send(b"\0")
        return theirs

    def close(self) -> None:
        """End the thread; functions then run without turns."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake.send(b"\0")
        self._thread.join()

    def _run(self) -> None:
        # The device is idle from the end of a turn until this thread has granted the next one.
        with short_switches.within():
            while not self._closing:
                self._look()
        for one in (*self._sockets.values(), self._wake, self._woken):
            one.close()
        self._selector.close()

    def _look(self) -> None:
        """Wait for news or for the time of a decision, and decide."""
        wait = self._table.next_look() - time.monotonic()
        for key, _ in self._selector.select(None if wait == math.inf else max(0.0, wait)):
            if key.data is None:
                self._woken.recv(_LONGEST)
            else:
                self._hear(key.data)
        self._decide()

    def _hear(self, key: str) -> None:
        """Take in all that a function has said."""
        connection = self._sockets[key]
        while True:
            try:
                message = connection.recv(_LONGEST)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if message[:1] == ASK and len(message) == ASK_FIELDS.size:
                fields = [_bounded(value) for value in ASK_FIELDS.unpack(message)[1:]]
                self._table.asks(key, Ask(*fields), time.monotonic())
            elif message == BACK:
                self._table.gives_back(key)
            else:  # its end, or no language of ours
                self._forget(key)
                return

    def _decide(self) -> None:
        while self._tell():  # a function that has gone leaves its turn to the next one
            pass

    def _tell(self) -> bool:
        """Grant and recall what is due; return whether a function was found to have gone."""
        now = time.monotonic()
        taken, has_gone = self._table.num_taken, False
        holder = self._table.holder
        granted, recalled = self._table.grant(now), self._table.recall(now)
        if self._table.num_taken > taken and holder is not None:
            logger.warning("Function %s did not give its turn back in time.", holder.split()[0])
        for key, word in ((granted, GRANT), (recalled, RECALL)):
            if key is not None and key in self._sockets:
                try:
                    self._sockets[key].send(word)
                except OSError:  # gone, or it does not read: its socket holds many words
                    self._forget(key)
                    has_gone = True
        return has_gone

    def _forget(self, key: str) -> None:
        self._table.gone(key)
        with self._lock:
            connection = self._sockets.pop(key, None)
        if connection is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            connection.close()


def _bounded(seconds: float) -> float:
    """Return seconds that a policy can compare: between -1e6 and 1e6, 0 for no number."""
    return min(max(seconds, -1e6), 1e6) if seconds == seconds else 0.0
