"""Turns of functions on one device: the holder, its recall, and the next one. No jax.

A turn is granted by margin (`policies.turns`) and has no end while nobody else asks. When somebody
does, it is asked back at the end of its time, or when a batch expires that waits for the device
(`policies.batching`) and can still be in time; one that is not given back by then is taken away.
Where all batches are late, shorter turns would cost more hand-overs and save no deadline. Times are
arguments.
"""

import dataclasses
import math

from serving.functions.policies.turns import Contender, in_turn

TURN_S = 0.1  # of steps, while others ask
LEAST_S = 0.02  # for a turn that others' expired batches interrupt
OVERDUE_S = 1.0  # from the asking back to the taking away; a step may be that long
NEVER_S = 1e6  # of work that nobody waits for: it has the device when nobody else wants it


@dataclasses.dataclass(frozen=True)
class Ask:
    """A function's report of the work that waits for the device, in seconds.

    Attributes:
        slo_s: from its oldest request's arrival to the deadline.
        waited_s: of these, gone when it asks.
        run_s: that the work takes alone.
        leaves_s: from the asking until its batch is full or expires; `slo_s` for answers that go
            on, which interrupt nobody; NEVER_S: it takes no turn from others.
    """

    slo_s: float
    waited_s: float
    run_s: float
    leaves_s: float


@dataclasses.dataclass
class _Turn:
    name: str
    since: float
    recalled: float = math.inf  # when it was asked back


class TurnTable:
    """The turns of one device; one thread uses it."""

    def __init__(self, turn_s: float = TURN_S, overdue_s: float = OVERDUE_S):
        self._turn_s, self._overdue_s = turn_s, overdue_s
        self._least_s = min(LEAST_S, turn_s)
        self._turn: _Turn | None = None
        self._asking: dict[str, tuple[Ask, float]] = {}  # and when
        self.num_taken = 0  # turns that were not given back in time

    @property
    def holder(self) -> str | None:
        """Name of the function whose turn it is."""
        return None if self._turn is None else self._turn.name

    def asks(self, name: str, ask: Ask, now: float) -> None:
        """A function waits for the device; a second time before its turn: with other work.

        During its turn it had not heard of that when it asked, and the turn is its answer.
        """
        if self.holder != name:
            self._asking[name] = ask, now

    def gives_back(self, name: str) -> None:
        """A function has nothing on the device; one whose turn was taken away may say so late."""
        if self.holder == name:
            self._turn = None

    def gone(self, name: str) -> None:
        """A function's process has ended."""
        self.gives_back(name)
        self._asking.pop(name, None)

    def grant(self, now: float) -> str | None:
        """Return the function whose turn begins now, if one does."""
        turn = self._turn
        if turn is not None and now >= turn.recalled + self._overdue_s:
            self.num_taken += 1
            self._turn = None
        if self._turn is not None or not self._asking:
            return None
        first = in_turn([self._contender(name, now) for name in self._asking])[0]
        del self._asking[first.name]
        self._turn = _Turn(first.name, now)
        return first.name

    def recall(self, now: float) -> str | None:
        """Return the function that is to give its turn back, once."""
        turn = self._turn
        if turn is None or turn.recalled < math.inf or now < self._recall_at(turn):
            return None
        turn.recalled = now
        return turn.name

    def next_look(self) -> float:
        """Return when `grant` or `recall` may say something without news; inf: never."""
        turn = self._turn
        if turn is None:
            return math.inf
        if turn.recalled < math.inf:
            return turn.recalled + self._overdue_s
        return self._recall_at(turn)

    def _recall_at(self, turn: _Turn) -> float:
        asking = [(ask, at) for ask, at in self._asking.values() if ask.leaves_s < NEVER_S]
        if not asking:
            return math.inf
        ends = [turn.since + self._turn_s]
        for ask, at in asking:
            leaves = max(turn.since + self._least_s, at + ask.leaves_s)
            if leaves < at + ask.slo_s - ask.waited_s:
                ends.append(leaves)
        return min(ends)

    def _contender(self, name: str, now: float) -> Contender:
        ask, at = self._asking[name]
        return Contender(name, ask.slo_s, ask.waited_s + now - at, ask.run_s)
