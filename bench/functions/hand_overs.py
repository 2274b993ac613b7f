"""Parts of the time between two functions' turns, by the stamps of keeper and functions."""

import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from serving.functions.turns.log import Turn

# Seconds of a hand-over from one turn to the next, in order. In the first two the device works on.
LEGS = {
    "recalled_to_noticed": lambda a, b: a.stamps.noticed - a.recalled,
    "noticed_to_passed": lambda a, b: a.stamps.passed - a.stamps.noticed,
    "passed_to_keeper": lambda a, b: a.back - a.stamps.passed,
    "keeper_to_granted": lambda a, b: b.granted - a.back,
    "granted_to_heard": lambda a, b: b.stamps.heard - b.granted,
    "heard_to_dispatched": lambda a, b: b.stamps.began - b.stamps.heard,
    "passed_to_ended": lambda a, b: a.ended - a.stamps.passed,
    "idle": lambda a, b: max(0.0, b.stamps.began - a.ended),
}


def pairs(turns: Iterable[Turn]) -> list[tuple[Turn, Turn]]:
    """Return turns that were asked back, each with the next one, both of them over."""
    return [
        (a, b)
        for a, b in pairwise(turns)
        if a.name != b.name and a.recalled and a.stamps.noticed and a.ended and b.stamps.began
    ]


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return medians in ms of the parts of a hand-over; `idle` from the end of the last step.

    `idle_share` is its part of the turns' time, `turn` their length. Empty without a hand-over.
    """
    found = pairs(turns)
    if not found:
        return {}
    lengths = [a.stamps.passed - a.stamps.heard for a, _ in found]
    idle = sum(LEGS["idle"](a, b) for a, b in found)
    medians = {
        name: round(1e3 * statistics.median(leg(a, b) for a, b in found), 3)
        for name, leg in LEGS.items()
    }
    return {
        "hand_overs": len(found),
        "turn": round(1e3 * statistics.median(lengths), 1),
        **medians,
        "idle_share": round(idle / (idle + sum(lengths)), 4),
    }
