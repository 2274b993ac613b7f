"""Grants functions their turns on the device, over a socket to each. No jax.

A function's death ends its socket, and with it its turn. What another says of its work, or does not
say, costs others no more than the limits of `turns.table`.
"""

import contextlib
import logging
import math
import selectors
import socket
import threading
import time

from serving.functions.short_switches import short_switches
from serving.functions.turns import messages as messages
from serving.functions.turns.log import Stamps, TurnLog
from serving.functions.turns.table import Ask, TurnTable

logger = logging.getLogger(__name__)

_AT_ONCE = 16  # messages of one function
_MOST_S = 1e6


class TurnKeeper:
    """The turns of one device, on a thread of its own; any thread may call."""

    def __init__(self, table: TurnTable | None = None):
        self.table = table or TurnTable()
        self.log = TurnLog()
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
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        # The device is idle from the end of a turn until this thread has granted the next one.
        with short_switches.within():
            while not self._closing:
                self._look()
        for one in self._sockets.values():
            one.close()
        self._selector.close()

    def _look(self) -> None:
        """Wait for news or for the time of a decision, and decide."""
        wait = self.table.next_look() - time.monotonic()
        for key, _ in self._selector.select(None if wait == math.inf else max(0.0, wait)):
            if key.data is None:
                self._woken.recv(messages.LONGEST)
            else:
                self._hear(key.data)
        self._decide()

    def _hear(self, key: str) -> None:
        """Take in what a function has said; of one that never ends, a part before each decision."""
        connection = self._sockets[key]
        for _ in range(_AT_ONCE):
            try:
                message = connection.recv(messages.LONGEST)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not self._take_in(key, message, time.monotonic()):  # its end, or no language of ours
                self._forget(key)
                return

    def _take_in(self, key: str, message: bytes, now: float) -> bool:
        """Note what a function says; return whether it was a message."""
        letter, size = message[:1], len(message)
        if letter == messages.ASK and size == messages.ASK_FIELDS.size:
            slo_s, waited_s, run_s, leaves_s = messages.ASK_FIELDS.unpack(message)[1:]
            times = _bounded(slo_s, 0.0), _bounded(waited_s, 0.0), _bounded(run_s, 0.0)
            self.table.asks(key, Ask(*times, _bounded(leaves_s, -_MOST_S)), now)
        elif letter == messages.BACK and size == messages.BACK_FIELDS.size:
            _, runs, *stamps = messages.BACK_FIELDS.unpack(message)
            self.log.back(key, Stamps(*stamps), now)
            if runs:
                self.table.passes_on(key, now)
            else:
                self._end_turn(key, now)
        elif message == messages.ENDED:
            self._end_turn(key, now)
        else:
            return False
        return True

    def _end_turn(self, key: str, now: float) -> None:
        self.table.gives_back(key)
        if (times := self.log.ended(key, now)) is not None:
            self.table.handed_over(*times)

    def _decide(self) -> None:
        while self._tell():  # a function that has gone leaves its turn to the next one
            pass

    def _tell(self) -> bool:
        """Grant and recall what is due; return whether a function was found to have gone."""
        now = time.monotonic()
        for key in self.table.take_late(now):
            logger.warning("The turn of function %s did not end in time.", key.split()[0])
        told = True
        if (alone := self.table.alone()) is not None:
            told &= self._send(alone, messages.word(messages.ALONE, now))
        if (granted := self.table.grant(now)) is not None:
            self.log.granted(granted, now)
            letter = messages.FOLLOW if self.table.is_shared else messages.GRANT
            told &= self._send(granted, messages.word(letter, now))
        if (recalled := self.table.recall(now)) is not None:
            self.log.recalled(recalled, now)
            told &= self._send(recalled, messages.word(messages.RECALL, now))
        return not told

    def _send(self, key: str, message: bytes) -> bool:
        """Return whether a function was told; one that was not has gone."""
        if (connection := self._sockets.get(key)) is None:
            return True
        try:
            connection.send(message)
        except OSError:  # gone, or it does not read: its socket holds many words
            self._forget(key)
            return False
        return True

    def _forget(self, key: str) -> None:
        self.table.gone(key)
        self.log.ended(key, time.monotonic())
        with self._lock:
            connection = self._sockets.pop(key, None)
        if connection is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(connection)
            connection.close()


def _bounded(seconds: float, least: float) -> float:
    """Return seconds that a policy can compare: between `least` and _MOST_S, 0 for no number."""
    return min(max(seconds, least), _MOST_S) if seconds == seconds else 0.0
