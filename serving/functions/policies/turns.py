"""Order in which functions get the device (ServerlessLoRA, section 4.2, Eq. 5 and 6).

One batch has the device at a time: a prefill, or some decode steps. M batches that want it take M
times as long in turns, so the one with the least margin to its deadline runs first. A negative
margin runs first too; nothing is dropped here.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Contender:
    """A batch that wants the device.

    Attributes:
        name: of its function.
        slo_s: seconds from its request's arrival (prefill) or last token (decode) to its deadline.
        waited_s: seconds of these that are gone.
        run_s: seconds that it takes alone.
    """

    name: str
    slo_s: float
    waited_s: float
    run_s: float


def margin(contender: Contender, num_contenders: int) -> float:
    """Return Eq. 6 in seconds: SLO - (w + M T); M counts the contender itself."""
    return contender.slo_s - (contender.waited_s + num_contenders * contender.run_s)


def in_turn(contenders: Sequence[Contender]) -> list[Contender]:
    """Return the batches by rising margin; equal ones by waiting time, longest first, then name."""
    m = len(contenders)
    return sorted(contenders, key=lambda c: (margin(c, m), -c.waited_s, c.name))
