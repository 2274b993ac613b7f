"""Times of the last turns on a device, of which the parts of a hand-over follow. No jax."""

import collections
import dataclasses
from typing import NamedTuple

_KEPT = 1024  # turns


class Stamps(NamedTuple):
    """Times of a function's turn, by its monotonic clock in seconds; 0: it did not happen."""

    heard: float = 0.0  # of its turn
    began: float = 0.0  # its first step is dispatched
    noticed: float = 0.0  # that the turn is asked back
    passed: float = 0.0  # it gives the turn back


@dataclasses.dataclass
class Turn:
    """A turn as the keeper saw it, and what the function said of it."""

    name: str
    granted: float
    recalled: float = 0.0
    back: float = 0.0  # the keeper has read that the turn is over
    ended: float = 0.0  # and that nothing of it runs
    stamps: Stamps = dataclasses.field(default_factory=Stamps)


class TurnLog:
    """The last turns in order; the keeper's thread writes it."""

    def __init__(self):
        self.turns: collections.deque[Turn] = collections.deque(maxlen=_KEPT)
        self._open: dict[str, Turn] = {}

    def granted(self, name: str, now: float) -> None:
        """Begin a turn."""
        self._open[name] = turn = Turn(name, now)
        self.turns.append(turn)

    def recalled(self, name: str, now: float) -> None:
        """Note that a turn is asked back."""
        if (turn := self._open.get(name)) is not None:
            turn.recalled = now

    def back(self, name: str, stamps: Stamps, now: float) -> None:
        """Note that a turn is over."""
        if (turn := self._open.get(name)) is not None and not turn.back:
            turn.stamps, turn.back = stamps, now

    def ended(self, name: str, now: float) -> tuple[float, float] | None:
        """Note that nothing of a turn runs.

        Return how long after it was asked back it was over, and its last step after that; None of a
        turn that was not asked back.
        """
        if (turn := self._open.pop(name, None)) is None:
            return None
        turn.ended = now
        if not turn.recalled:
            return None
        back = turn.back or now
        return back - turn.recalled, now - back
