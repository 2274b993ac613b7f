"""Turns of functions on one device: the holder, its recall, and the next one. No jax.

A turn is granted by margin (`policies.turns`) and has no end while nobody else asks. When somebody
does, it is asked back at the end of its time, or earlier for a batch that waits for the device and
can still be in time: by a hand-over before it expires (`policies.batching`). One that is not given
back in time is taken away.
Where all batches are late, shorter turns would cost more hand-overs and save no deadline. A
function that has waited very long has the next turn whatever the others claim.

A turn may be passed on while its last step runs: the next function plans and dispatches meanwhile.
So two functions at most have steps on the device, the holder and the one before it. Times are
arguments.
"""

import collections
import dataclasses
import math
import statistics

from serving.functions.policies.turns import Contender, in_turn

TURN_S = 0.1  # of steps, while others ask
LEAST_S = 0.02  # for a turn that others' expired batches interrupt
OVERDUE_S = 1.0  # from the asking back, or passing on, to the taking away; a step may be that long
STARVED_S = 10.0  # after so long in the table work comes before all margins, which are claims
_LAST = 15  # hand-overs, whose median is what the next one is expected to take
NEVER_S = 1e6  # of work that nobody waits for: it has the device when nobody else wants it


@dataclasses.dataclass(frozen=True)
class Ask:
    """A function's report of the work that waits for the device, in seconds.

    Attributes:
        slo_s: from its oldest request's arrival to the deadline.
        waited_s: of these, gone when it asks.
        run_s: that the work takes alone.
        leaves_s: from the asking until its batch expires; `slo_s` for answers that go on, which
            interrupt nobody; NEVER_S: it takes no turn from others.
    """

    slo_s: float
    waited_s: float
    run_s: float
    leaves_s: float


@dataclasses.dataclass
class _Turn:
    name: str
    since: float
    shared: bool  # with the last step of the turn before
    recalled: float = math.inf  # when it was asked back


class TurnTable:
    """The turns of one device; one thread uses it."""

    def __init__(
        self, turn_s: float = TURN_S, overdue_s: float = OVERDUE_S, *, overlaps: bool = True
    ):
        """Unless it `overlaps`, a turn begins when nothing of the one before runs."""
        self._turn_s, self._overdue_s = turn_s, overdue_s
        self._least_s, self.overlaps = min(LEAST_S, turn_s), overlaps
        self._turn: _Turn | None = None
        self._asking: dict[str, tuple[Ask, float]] = {}  # and when
        self._ending: dict[str, float] = {}  # functions that passed their turn on, and when
        self._hand_overs: collections.deque[float] = collections.deque(maxlen=_LAST)
        self.num_taken = 0  # turns that were not given back in time

    @property
    def holder(self) -> str | None:
        """Name of the function whose turn it is."""
        return None if self._turn is None else self._turn.name

    @property
    def is_shared(self) -> bool:
        """True while the last step of the turn before may run beside the holder's."""
        return self._turn is not None and self._turn.shared

    def asks(self, name: str, ask: Ask, now: float) -> None:
        """A function waits for the device; a second time before its turn: with other work.

        During its turn it had not heard of that when it asked, and the turn is its answer. One that
        asks has read its last step.
        """
        if self.holder != name:
            self._ending.pop(name, None)
            self._asking[name] = ask, now

    def passes_on(self, name: str, now: float) -> None:
        """A function's turn is over, and its last step runs; `gives_back` tells of its end."""
        if self.holder == name:
            self._turn, self._ending[name] = None, now

    def gives_back(self, name: str) -> None:
        """A function has nothing on the device; one whose turn was taken away may say so late."""
        self._ending.pop(name, None)
        if self.holder == name:
            self._turn = None

    def handed_over(self, back_s: float, last_step_s: float) -> None:
        """Note how long after a turn was asked back it was over, and its last step after that.

        While that step runs, the next turn has half of the device, if it may have begun.
        """
        self._hand_overs.append(back_s + last_step_s * (0.5 if self.overlaps else 1.0))

    def gone(self, name: str) -> None:
        """A function's process has ended."""
        self.gives_back(name)
        self._asking.pop(name, None)

    def take_late(self, now: float) -> list[str]:
        """Take their turns from functions that did not end them in time; return their names."""
        late = [name for name, since in self._ending.items() if now >= since + self._overdue_s]
        turn = self._turn
        if turn is not None and now >= turn.recalled + self._overdue_s:
            late.append(turn.name)
        for name in late:
            self.gives_back(name)
        self.num_taken += len(late)
        return late

    def alone(self) -> str | None:
        """Return the holder, once, when the last step of the turn before its own has ended."""
        turn = self._turn
        if turn is None or not turn.shared or self._ending:
            return None
        turn.shared = False
        return turn.name

    def grant(self, now: float) -> str | None:
        """Return the function whose turn begins now, if one does."""
        if self._turn is not None or not self._asking or len(self._ending) > self.overlaps:
            return None
        name = self._starved(now)
        if name is None:
            name = in_turn([self._contender(name, now) for name in self._asking])[0].name
        del self._asking[name]
        self._turn = _Turn(name, now, shared=bool(self._ending))
        return name

    def _starved(self, now: float) -> str | None:
        """Return the function that has asked longest, if that is STARVED_S or more ago."""
        asked = {n: at for n, (ask, at) in self._asking.items() if ask.leaves_s < NEVER_S}
        name = min(asked, key=lambda n: asked[n], default=None)
        return name if name is not None and now >= asked[name] + STARVED_S else None

    def recall(self, now: float) -> str | None:
        """Return the function that is to give its turn back, once."""
        turn = self._turn
        if turn is None or turn.recalled < math.inf or now < self._recall_at(turn):
            return None
        turn.recalled = now
        return turn.name

    def next_look(self) -> float:
        """Return when `take_late` or `recall` may say something without news; inf: never."""
        late_at = min(self._ending.values(), default=math.inf) + self._overdue_s
        turn = self._turn
        if turn is None:
            return late_at
        if turn.recalled < math.inf:
            return min(late_at, turn.recalled + self._overdue_s)
        return min(late_at, self._recall_at(turn))

    def _recall_at(self, turn: _Turn) -> float:
        asking = [(ask, at) for ask, at in self._asking.values() if ask.leaves_s < NEVER_S]
        if not asking:
            return math.inf
        ends = [turn.since + self._turn_s]
        ahead_s = statistics.median(self._hand_overs) if self._hand_overs else 0.0
        for ask, at in asking:
            leaves = max(turn.since + self._least_s, at + ask.leaves_s - ahead_s)
            if leaves < at + ask.slo_s - ask.waited_s:
                ends.append(leaves)
        return min(ends)

    def _contender(self, name: str, now: float) -> Contender:
        ask, at = self._asking[name]
        return Contender(name, ask.slo_s, ask.waited_s + now - at, ask.run_s)
