"""A function's side of its turns on the device: when it asks, and for how long. No jax.

A batch is the requests that wait when the turn comes. Its prefill time is fitted to the measured
ones (Eq. 3), and by it the batch expires (Eq. 4) while another function has the device. A full
batch interrupts no turn before it expires: others would lose what it gains, and a hand-over more.
"""

import collections
import contextlib
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence

from serving.functions.policies.batching import PrefillTime, expires_at, fit, largest_batch
from serving.functions.turns import messages as messages
from serving.functions.turns.log import Stamps
from serving.functions.turns.table import NEVER_S, TURN_S

_MEASURED = 64  # prefills that the fit takes
_LOOK_S = 0.1  # between two looks for the time, while another has the device
_SLO = 5  # times the prefill of one request, where no SLO is given (ServerlessLoRA, 5.10)
_FIRST_S = 0.01  # of a prefill before any was measured
_IDLE = messages.ASK_FIELDS.pack(messages.ASK, NEVER_S, 0.0, 0.0, NEVER_S)


class TurnSide:
    """Turns as the engine's thread takes them: `serving.engine.loop.loop_parts.AbstractTurns`."""

    def __init__(self, connection: socket.socket, slo_s: float | None, limit: int):
        """`slo_s` is that of the first token, `limit` the largest batch. Owns the connection."""
        connection.setblocking(False)
        self._connection, self._slo_s, self._limit = connection, slo_s, limit
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # rung by `look`
        self._poll = select.poll()
        for one in (connection.fileno(), self._bell):
            self._poll.register(one, select.POLLIN)
        self._waits = False
        self._holds = self._is_due = self._alone = False
        self._is_ending = False  # the turn is passed on, and its last step was not read
        self._stamps, self._shared_until, self._passed = Stamps(), 0.0, 0.0
        self._measured: collections.deque[tuple[int, float]] = collections.deque(maxlen=_MEASURED)
        self._prefill = PrefillTime(_FIRST_S, 0.0)

    def take(self, arrivals: Callable[[], Sequence[float]], closing: Callable[[], bool]) -> None:
        """Return when the device is this function's, or `closing` says so.

        `arrivals` returns the times of the waiting requests, in order, by time.monotonic.
        """
        request = -1
        with self._waiting():
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
        with self._waiting():
            if not (self._holds or self._alone):
                self._send(_IDLE)
            while not (self._holds or self._alone or woken()):
                self._hear(_LOOK_S)
        return self._holds or self._alone

    def look(self) -> None:
        """Make `take` or `take_idle` look at what it was given; any thread may call this."""
        if self._waits:
            os.eventfd_write(self._bell, 1)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        self._waits = True  # before the first look, so that nothing comes between
        try:
            yield
        finally:
            self._waits = False

    @property
    def is_due(self) -> bool:
        """True if another function waits and this one's time is over."""
        if self._holds and not self._is_due:
            self._hear(0.0)
        return self._holds and self._is_due

    def dispatched(self) -> None:
        """Note that a step is on its way to the device."""
        if not self._stamps.began:
            self._stamps = self._stamps._replace(began=time.monotonic())

    def pass_on(self) -> None:
        """Let the next function's steps follow the one that runs; when it is read: `give_back`."""
        if self._holds:
            self._is_ending = True
            self._tell_back()

    def give_back(self) -> None:
        """Let others have the device, on which nothing of this function runs.

        That includes a turn which an earlier `take_idle` asked for, and which comes only now.
        """
        self._hear(0.0)
        if self._is_ending:
            self._is_ending = False
            self._send(messages.ENDED)
        if self._holds:
            self._tell_back()

    def close(self) -> None:
        """Leave the turns to others; nothing of this function runs on the device any more."""
        self._alone = True
        self._connection.close()

    def ran(self, num_prompts: int, began: float, ended: float) -> None:
        """Note a step that no other step of this function ran beside.

        It had the first tokens of so many prompts; times are those of time.monotonic. While the
        last step of another turn ran beside it, it had half of the device, and so while the steps
        of the turn ran that it was passed on to.
        """
        if num_prompts < 1 or ended <= began:
            return
        self._hear(0.0)
        shared = max(self._shared_until - began, 0.0)
        if self._is_ending:
            shared += ended - max(self._passed, began)
        seconds = ended - began - 0.5 * min(shared, ended - began)
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
            return messages.ASK_FIELDS.pack(messages.ASK, slo_s, 0.0, TURN_S, slo_s)
        batch = min(len(arrivals), largest_batch(time_of, slo_s, self._limit))
        leaves_s = expires_at(time_of, slo_s, batch, arrivals[0]) - now
        waited_s, run_s = now - arrivals[0], time_of.seconds(batch)
        return messages.ASK_FIELDS.pack(messages.ASK, slo_s, waited_s, run_s, leaves_s)

    def _hear(self, timeout_s: float) -> None:
        """Take in what the agent says within the time; its end leaves the device to us."""
        if timeout_s:
            ready = {fd for fd, _ in self._poll.poll(1000 * timeout_s)}
            if self._bell in ready:
                os.eventfd_read(self._bell)
            if ready <= {self._bell}:
                return
        while not self._alone:
            try:
                message = self._connection.recv(messages.LONGEST)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if len(message) == messages.WORD.size:
                self._take_in(*messages.WORD.unpack(message))
            else:
                self._alone = True

    def _take_in(self, word: bytes, at: float) -> None:
        if word in (messages.GRANT, messages.FOLLOW):
            self._holds, self._is_due = True, False
            self._stamps = Stamps(heard=time.monotonic())
            self._shared_until = math.inf if word == messages.FOLLOW else 0.0
        elif self._holds and word == messages.ALONE:  # else of a turn that was given back meanwhile
            self._shared_until = at
        elif self._holds and word == messages.RECALL:
            self._is_due = True
            self._stamps = self._stamps._replace(noticed=time.monotonic())

    def _tell_back(self) -> None:
        self._holds = self._is_due = False
        self._passed = time.monotonic()
        stamps = self._stamps._replace(passed=self._passed)
        self._send(messages.BACK_FIELDS.pack(messages.BACK, self._is_ending, *stamps))

    def _send(self, message: bytes) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._alone = True
