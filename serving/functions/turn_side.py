"""A function's side of its turns on the device: when it asks, and for how long. No jax.

A batch is the requests that wait when the turn comes. Its prefill time is fitted to the measured
ones (Eq. 3), and by it the batch is full or expires (Eq. 4) while another function has the device.
"""

import collections
import contextlib
import select
import socket
import time
from collections.abc import Callable, Sequence

from serving.functions.policies.batching import PrefillTime, fit, largest_batch, leaves_at
from serving.functions.turn_keeper import ASK, ASK_FIELDS, BACK, GRANT
from serving.functions.turn_table import NEVER_S, TURN_S

_MEASURED = 64  # prefills that the fit takes
_LOOK_S = 0.01  # between two looks for more requests while another has the device
_SLO = 5  # times the prefill of one request, where no SLO is given (ServerlessLoRA, 5.10)
_FIRST_S = 0.01  # of a prefill before any was measured
_IDLE = ASK_FIELDS.pack(ASK, NEVER_S, 0.0, 0.0, NEVER_S)


class TurnSide:
    """Turns as the engine's thread takes them: `serving.engine.loop.loop_parts.AbstractTurns`."""

    def __init__(self, connection: socket.socket, slo_s: float | None, limit: int):
        """`slo_s` is that of the first token, `limit` the largest batch. Owns the connection."""
        connection.setblocking(False)
        self._connection, self._slo_s, self._limit = connection, slo_s, limit
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._holds = self._is_due = self._alone = False
        self._measured: collections.deque[tuple[int, float]] = collections.deque(maxlen=_MEASURED)
        self._prefill = PrefillTime(_FIRST_S, 0.0)

    def take(self, arrivals: Callable[[], Sequence[float]], closing: Callable[[], bool]) -> None:
        """Return when the device is this function's, or `closing` says so.

        `arrivals` returns the times of the waiting requests, in order, by time.monotonic.
        """
        request = -1
        while not (self._holds or self._alone or closing()):
            waiting = arrivals()
            if len(waiting) != request:
                request = len(waiting)
                self._send(self._ask(waiting))
            self._hear(_LOOK_S)

    def take_idle(self, woken: Callable[[], bool]) -> bool:
        """Return True when nobody wants the device and it is this function's, False when `woken`.

        What is asked for then replaces this.
        """
        if not (self._holds or self._alone):
            self._send(_IDLE)
        while not (self._holds or self._alone or woken()):
            self._hear(_LOOK_S)
        return self._holds or self._alone

    @property
    def is_due(self) -> bool:
        """True if another function waits and this one's time is over."""
        if self._holds and not self._is_due:
            self._hear(0.0)
        return self._holds and self._is_due

    def give_back(self) -> None:
        """Let others have the device, on which nothing of this function runs."""
        if self._holds:
            self._holds = self._is_due = False
            self._send(BACK)

    def ran(self, num_prompts: int, seconds: float) -> None:
        """Note a step that ran alone, with the first tokens of so many prompts."""
        if num_prompts < 1 or seconds <= 0:
            return
        self._measured.append((num_prompts, seconds))
        sizes, times = zip(*self._measured, strict=True)
        line = PrefillTime(max(min(times), 1e-6), 0.0)
        if len(set(sizes)) > 1:
            with contextlib.suppress(ValueError):  # noise left no time for one request
                line = fit(sizes, times)
        self._prefill = line

    def _ask(self, arrivals: Sequence[float]) -> bytes:
        now, time_of = time.monotonic(), self._prefill
        slo_s = self._slo_s or _SLO * time_of.seconds(1)
        if not arrivals:  # only answers that go on
            return ASK_FIELDS.pack(ASK, slo_s, 0.0, TURN_S, slo_s)
        largest = largest_batch(time_of, slo_s, self._limit)
        leaves = leaves_at(time_of, slo_s, largest, arrivals, float("inf"))
        run_s = time_of.seconds(min(len(arrivals), largest))
        return ASK_FIELDS.pack(ASK, slo_s, now - arrivals[0], run_s, leaves - now)

    def _hear(self, timeout_s: float) -> None:
        """Take in what the agent says within the time; its end leaves the device to us."""
        if timeout_s and not self._poll.poll(1000 * timeout_s):
            return
        try:
            word = self._connection.recv(1)
        except BlockingIOError:
            return
        except OSError:
            word = b""
        if word == GRANT:
            self._holds, self._is_due = True, False
        elif word:
            self._is_due = self._holds  # of a turn that was given back meanwhile: nothing
        else:
            self._alone = True

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._alone = True
