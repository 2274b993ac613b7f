"""Line of requests that wait for host memory for their adapters: the earliest deadline first.

Of equal deadlines callers take turns, each one's requests in their order. Requests for adapters in
memory pass those that wait. That is bounded: when the first one has waited for its patience, the
adapters that would be evicted for it get no later requests until it has room. No jax.
"""

import bisect
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lora_jax.adapters.registry_errors import HostFull

LOOK_S = 1.0  # a request that waits looks so often though nothing woke it
PATIENCE_S = 30.0  # a request is passed by others for so long at most
_ENDED = "The engine has stopped; no adapter gets room in host memory any more."


@dataclasses.dataclass(eq=False)
class Ticket:
    """A request on its way to its adapter; it stands in the line from its first refusal on."""

    order: tuple[float, int, int]  # deadline, round of its caller's turns, number of arrival
    wake: Callable[[], None]
    patience_s: float
    lends: bool  # the entry counts as in use while the caller holds it
    owner: str = ""  # the caller
    since_s: float = 0.0  # of the wait
    name: str = ""
    seen: int = 0  # changes of the line before the last attempt
    is_open: bool = True


class RoomLine:
    """Requests that wait for room; any thread may call any method.

    `wake` of a ticket is called with the lock held: it must not wait or call back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: list[Ticket] = []  # in their order
        self._drained: frozenset[str] = frozenset()  # digests
        self._round = 0  # of the last one that was first
        self._has_ended = False
        self.num_changes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @contextlib.contextmanager
    def ticket(self, wake: Callable[[], None], **options: Any) -> Iterator[Ticket]:
        """Yield the ticket that `begin` returns for these arguments, and `end` it."""
        ticket = self.begin(wake, **options)
        try:
            yield ticket
        finally:
            self.end(ticket)

    def begin(
        self,
        wake: Callable[[], None],
        *,
        deadline: float = float("inf"),
        wait_s: float = 2 * PATIENCE_S,
        lends: bool = True,
        owner: str = "",
    ) -> Ticket:
        """Return a ticket for one request of a caller, which may wait for `wait_s` seconds.

        `end` must follow.
        """
        with self._lock:  # start-time fair queueing: a round later than the caller's last one
            turn = self._round
            if self._waiting:
                rounds = [one.order[1] + 1 for one in self._waiting if one.owner == owner]
                turn = max([turn, *rounds])
            order = deadline, turn, next(self._numbers)
        return Ticket(order, wake, min(PATIENCE_S, wait_s / 2), lends, owner)

    def end(self, ticket: Ticket) -> None:
        """Let a ticket wait no more."""
        with self._lock:
            ticket.is_open = False
            if self._waiting:
                self._take_out(ticket)

    def enter(self, ticket: Ticket, name: str) -> None:
        """Have a request wait, unless it waits already or has left for good."""
        with self._lock:
            if ticket.is_open and ticket not in self._waiting:
                ticket.name, ticket.since_s = name, ticket.since_s or self._clock()
                # At once, as others look without the lock.
                bisect.insort(self._waiting, ticket, key=lambda one: one.order)
                if ticket.seen != self.num_changes:  # room may have come before it stood here
                    ticket.wake()

    def leave(self, ticket: Ticket) -> None:
        """Take a request out, which has room: it is the next one's turn."""
        with self._lock:
            self._take_out(ticket)

    def must_wait(self, ticket: Ticket | None) -> bool:
        """Return whether an earlier request waits for room. Without a ticket none is earlier."""
        first = next(iter(self._waiting), None)
        return ticket is not None and first is not None and first.order < ticket.order

    def is_too_long(self, ticket: Ticket, most: int) -> bool:
        """Return whether more than `most` wait, and its caller's part is full without this one.

        A caller's part is an equal one, and those of its requests that came before count.
        """
        with self._lock:
            if len(self._waiting) <= most:
                return False
            owners = {one.owner for one in self._waiting}
            own = [one for one in self._waiting if one.owner == ticket.owner]
        before = sum(one.order[-1] < ticket.order[-1] for one in own)
        return before >= most // len(owners)

    def is_closed(self, digest: str, ticket: Ticket | None) -> bool:
        """Return whether an adapter in memory gets no requests for the sake of the first one."""
        return digest in self._drained and (ticket is None or self.must_wait(ticket))

    def drain(self, ticket: Ticket, digests: frozenset[str]) -> None:
        """Close adapters to later requests, if the first request has waited for its patience."""
        with self._lock:
            if self._waiting[:1] != [ticket]:
                return
            if self._clock() - ticket.since_s >= ticket.patience_s:
                self._drained = digests

    def close(self) -> None:
        """Let no request wait any longer: what would give it room has ended."""
        with self._lock:
            self._has_ended = True
            for ticket in self._waiting:
                ticket.wake()

    def check_open(self) -> None:
        """Raise HostFull where a request would wait for ever."""
        if self._has_ended:
            raise HostFull(_ENDED)

    def changed(self) -> None:
        """Wake the first request: an adapter may have become idle."""
        with self._lock:
            self.num_changes += 1
            self._wake_first()

    def arrived(self, name: str) -> None:
        """Wake the requests for an adapter that is in memory now."""
        with self._lock:
            self.num_changes += 1
            for ticket in self._waiting:
                if ticket.name == name:
                    ticket.wake()

    def _take_out(self, ticket: Ticket) -> None:
        if ticket not in self._waiting:
            return
        was_first = self._waiting[0] is ticket
        self._waiting.remove(ticket)
        self.num_changes += 1
        if not was_first:
            return
        self._round = ticket.order[1]
        if self._drained:  # those that wait for such an adapter may go on
            self._drained = frozenset()
            for other in self._waiting:
                other.wake()
        self._wake_first()

    def _wake_first(self) -> None:
        for ticket in self._waiting[:1]:
            ticket.wake()


def wait_in_line[E](
    line: RoomLine,
    attempt: Callable[[Ticket], E],
    wait_s: float,
    *,
    deadline: float = float("inf"),
    lends: bool = True,
) -> E:
    """Return what `attempt` returns when there is room for it; other threads may do so meanwhile.

    Raises what it raises, HostFull after `wait_s` seconds.
    """
    bell = _Bell()
    ticket = line.begin(bell.ring, deadline=deadline, wait_s=wait_s, lends=lends)
    try:
        until = time.monotonic() + wait_s
        while True:
            ticket.seen = line.num_changes
            try:
                return attempt(ticket)
            except HostFull as full:
                line.check_open()
                left = until - time.monotonic()
                if left <= 0:
                    raise full.after(wait_s) from None
            bell.wait(min(left, LOOK_S))
    finally:
        line.end(ticket)


class _Bell:
    """A threading.Event for one waiter, whose `ring` is called by one thread at a time.

    Nearly all requests find their adapter at once: of an Event they would pay for the making alone.
    """

    def __init__(self):
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """Have the next `wait`, or the one under way, return."""
        if self._silent.locked():
            self._silent.release()

    def wait(self, seconds: float) -> None:
        """Wait for a ring since the last call, so long at most."""
        self._silent.acquire(timeout=seconds)
