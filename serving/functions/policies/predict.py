"""Predicted arrival rate of a function, from its last few gaps (arrivals taken as Poisson).

ServerlessLoRA names no predictor. This is the one of a later paper of the same group (Tyche): the
rate is that of the last 5 gaps; artifacts are worth loading from the moment at which an arrival is
6% likely until it is 94% overdue. Behind that the gaps count which outlasted such windows before.
"""

import dataclasses
import math
import statistics
import threading
from collections.abc import Iterable, Sequence

GAPS = 5
_OUTLASTING, _MARGIN = 10, 1.1  # gaps that are remembered; of the longest one
_LONGEST_S = 3600.0  # of such a gap: a process that idles for hours costs more than its start


@dataclasses.dataclass(frozen=True)
class Window:
    """Seconds after the last arrival between which the next one is expected."""

    start_s: float
    end_s: float


def rate_of(arrivals: Sequence[float]) -> float:
    """Return requests per second over the last 5 gaps of the rising times; 0 below two arrivals.

    Simultaneous arrivals count as 1 ms apart, or their rate would be infinite.
    """
    recent = arrivals[-(GAPS + 1) :]
    if len(recent) < 2:
        return 0.0
    return (len(recent) - 1) / max(recent[-1] - recent[0], 1e-3 * (len(recent) - 1))


def expected_window(rate: float, low: float = 0.06, high: float = 0.94) -> Window:
    """Return when the probability of an arrival, 1 - exp(-rate t), passes `low` and `high`.

    A rate of 0 gives a window that never begins.
    """
    if rate <= 0:
        return Window(math.inf, math.inf)
    return Window(-math.log1p(-low) / rate, -math.log1p(-high) / rate)


class Arrivals:
    """Times of a function's calls, as far as they say when the next one comes; any thread may call.

    Calls that come in bursts end each with a gap that outlasts the window of the burst's rate. Then
    the next call is expected until a tenth more than the longest of the last 10 such gaps is over.
    Gaps of more than an hour are none of them.
    """

    def __init__(self, times: Iterable[float] = (), *, begin: float = -math.inf):
        """Know these times, which rise; `begin` is the function's own, before any call."""
        self._begin = begin
        self._lock = threading.Lock()
        # The last few times, and the last gaps that outlasted a window; replaced, never changed.
        self._known: tuple[tuple[float, ...], tuple[float, ...]] = (), ()
        for moment in times:
            self.add(moment)

    @property
    def last(self) -> float:
        """Time of the last call; the beginning before any."""
        recent, _ = self._known
        return recent[-1] if recent else self._begin

    def add(self, moment: float) -> None:
        """Note a call."""
        with self._lock:
            recent, outlasting = self._known
            gap_s = moment - recent[-1] if recent else 0.0
            if (rate := rate_of(recent)) and expected_window(rate).end_s < gap_s <= _LONGEST_S:
                outlasting = (*outlasting, gap_s)[-_OUTLASTING:]
            self._known = (*recent, moment)[-(GAPS + 1) :], outlasting

    def rate(self) -> float:
        """Return requests per second over the last 5 gaps; 0 below two calls."""
        return rate_of(self._known[0])

    def predicted_rate(self, now: float) -> float:
        """Return the rate that pre-loading counts with: 0 while no call is expected."""
        recent, outlasting = self._known
        rate = rate_of(recent)
        if not rate:
            return 0.0
        window, gap_s = expected_window(rate), now - recent[-1]
        if gap_s <= window.end_s:
            return rate if gap_s >= window.start_s else 0.0
        if outlasting and gap_s <= _MARGIN * max(outlasting):
            return 1 / statistics.median(outlasting)
        return 0.0

    def stays(self, now: float, keep_alive_s: float) -> bool:
        """Return whether an idle function keeps its process: just used, or its next call expected.

        Before any call its beginning counts as a use.
        """
        return now - self.last <= keep_alive_s or self.predicted_rate(now) > 0
