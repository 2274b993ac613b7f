"""Turns of functions on one device: the holder, its recall, and the next one. No jax.

A turn is granted by margin (`policies.turns`) and has no end while nobody else asks. When somebody
does, it is asked back at the end of its time, or earlier for a batch that waits for the device and
can still be in time: by a hand-over before it expires (`policies.batching`). One that is not given
back in time is taken away.
Where all batches are late, shorter turns would cost more hand-overs and save no deadline. A
function that has waited very long has the next turn whatever the others claim.

A batch of first tokens that can be in time interrupts answers that go on at the end of their step,
and has the next turn, while the hand-overs of such interruptions take a small part of the time. An
answer that would be late itself is not held up.

A turn may be passed on while its last step runs: the next function plans and dispatches meanwhile.
So two functions at most have steps on the device, the holder and the one before it. Times are
arguments.
"""

import collections
import dataclasses
import math
import statistics

from serving.functions.policies.turns import Contender, in_turn, margin

TURN_S = 0.1  # of steps, while others ask
LEAST_S = 0.02  # for a turn that others' expired batches interrupt
EARLY_S = 0.002  # for a turn of answers that go on, which first tokens interrupt
EARLY_SHARE = 0.05  # of the time, for hand-overs of such interruptions
EARLY_SAVED_S = 0.1  # of that share at most, where there were none for long
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

    @property
    def is_first(self) -> bool:
        """True of first tokens; answers that go on leave at their deadline."""
        return self.leaves_s < self.slo_s

    def deadline(self, asked_at: float) -> float:
        """Return when the work is late."""
        return asked_at + self.slo_s - self.waited_s


@dataclasses.dataclass
class _Turn:
    name: str
    since: float
    first_s: float  # that its own first tokens take, for which it is left alone
    shared: bool  # with the last step of the turn before
    recalled: float = math.inf  # when it was asked back


class TurnTable:
    """The turns of one device; one thread uses it."""

    def __init__(
        self,
        turn_s: float = TURN_S,
        overdue_s: float = OVERDUE_S,
        *,
        overlaps: bool = True,
        early_share: float = EARLY_SHARE,
    ):
        """Unless it `overlaps`, a turn begins when nothing of the one before runs. With an
        `early_share` of 0 no first tokens interrupt answers before they expire.
        """
        self._turn_s, self._overdue_s, self.early_share = turn_s, overdue_s, early_share
        self._least_s, self.overlaps = min(LEAST_S, turn_s), overlaps
        self._turn: _Turn | None = None
        self._asking: dict[str, tuple[Ask, float]] = {}  # and when
        self._ending: dict[str, float] = {}  # functions that passed their turn on, and when
        self._hand_overs: collections.deque[float] = collections.deque(maxlen=_LAST)
        self._saved = EARLY_SAVED_S, 0.0  # seconds for early hand-overs, and when they were so many
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
        name = self._starved(now) or self._next(now)
        ask, _ = self._asking.pop(name)
        first_s = ask.run_s if ask.is_first else 0.0
        self._turn = _Turn(name, now, first_s, shared=bool(self._ending))
        return name

    def _next(self, now: float) -> str:
        """Return the first one by margin; first tokens in time come before answers that are too."""
        line = in_turn([self._contender(name, now) for name in self._asking])
        if margin(line[0], len(line)) < 0 or not self.early_share:
            return line[0].name
        in_time = (one.name for one in line if self._is_first_in_time(one.name, now))
        return next(in_time, line[0].name)

    def _is_first_in_time(self, name: str, now: float) -> bool:
        ask, at = self._asking[name]
        return ask.is_first and now < ask.deadline(at)

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
        if now < self._usual_end(turn):
            self._saved = self._saved_s(now) - self._hand_over_s, now
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

    @property
    def _hand_over_s(self) -> float:
        return statistics.median(self._hand_overs) if self._hand_overs else 0.0

    def _saved_s(self, now: float) -> float:
        """Return the time that early hand-overs may take."""
        saved_s, at = self._saved
        return min(saved_s + self.early_share * (now - at), EARLY_SAVED_S)

    def _recall_at(self, turn: _Turn) -> float:
        return min(self._usual_end(turn), self._early_end(turn))

    def _waiting(self) -> list[tuple[Ask, float]]:
        return [(ask, at) for ask, at in self._asking.values() if ask.leaves_s < NEVER_S]

    def _usual_end(self, turn: _Turn) -> float:
        """Return when the time of a turn is over, or a batch that waits expires."""
        waiting = self._waiting()
        if not waiting:
            return math.inf
        ends = [turn.since + self._turn_s]
        for ask, at in waiting:
            leaves = max(turn.since + self._least_s, at + ask.leaves_s - self._hand_over_s)
            if leaves < ask.deadline(at):
                ends.append(leaves)
        return min(ends)

    def _early_end(self, turn: _Turn) -> float:
        """Return when first tokens may interrupt answers that go on; inf: others would be next."""
        asked = [at for ask, at in self._waiting() if ask.is_first]
        if not asked or not self.early_share:
            return math.inf
        saved_s, at = self._saved
        paid = at + (self._hand_over_s - saved_s) / self.early_share
        end = max(turn.since + max(EARLY_S, turn.first_s), min(asked), paid)
        return end if self._is_first_in_time(self._next(end), end) else math.inf

    def _contender(self, name: str, now: float) -> Contender:
        ask, at = self._asking[name]
        return Contender(name, ask.slo_s, ask.waited_s + now - at, ask.run_s)
