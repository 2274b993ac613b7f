"""The time at which the next step is planned while one runs on the device. No jax.

A step that is planned as soon as possible keeps the device busy, but a request that comes after
that waits for it too: for two steps instead of one. Where several tenants ask, the loop therefore
plans as late as the device allows: before the end of the step that runs, by the time the host takes
and a margin. So it does beside a step with masks on few cores, which the plan would take from it.
Times of steps are the shortest ones lately, so that a wrong guess plans early.
"""

import collections
from collections.abc import Callable

# Seconds until a thread that keeps the interpreter's lock gives it to one that waits, in a server.
# The engine's thread asks for it some six times a step, each time after it has waited for the
# device, and the event loop keeps the lock so long while it writes to many streams. With Python's
# 5 ms, 256 streams got half as many tokens/s.
SWITCH_S = 0.0003
_LATELY = 16  # steps of a size, and plans, that are remembered
_SHARED_S = 60.0  # so long after its last request a tenant counts
_MARGIN = 0.1  # of the step
_LEAST_MARGIN_S = 0.0005
_IDLE_S = 0.0002  # a step that was read faster had ended before
_SHORTEN = 0.8  # after a step that had ended before: the guess was too long


class Pacer:
    """Times of steps and of the host's work between them; the loop's thread uses it.

    `asked` may be called from any thread, one at a time.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._asked: dict[str, float] = {}
        self._steps: dict[int, collections.deque[float]] = {}  # seconds, by size
        self._host: collections.deque[float] = collections.deque(maxlen=_LATELY)
        self._began = 0.0  # the step that is on the device

    def asked(self, tenant: str) -> None:
        """Note a request."""
        now = self._clock()
        lately = {t: at for t, at in self._asked.items() if now - at < _SHARED_S}
        # Never changed in place: the loop's thread reads it without the lock.
        self._asked = lately | {tenant: now}

    def wait_s(self, num_tokens: int, *, late: bool = False) -> float:
        """Return how long the plan after the step that runs, of `num_tokens`, can wait.

        With `late` it waits though only one tenant asks.
        """
        now, times = self._clock(), self._steps.get(num_tokens.bit_length())
        if not times or not self._host or not (late or self._is_shared(now)):
            return 0.0
        step = min(times)
        margin = max(_LEAST_MARGIN_S, _MARGIN * step)
        return max(0.0, self._began + step - max(self._host) - margin - now)

    @property
    def waits(self) -> bool:
        """True if plans wait at all now."""
        return self._is_shared(self._clock())

    def dispatched(self, planning_began: float, *, follows: bool) -> None:
        """Note that a step went to the device: after the one that runs, or at once."""
        now = self._clock()
        self._host.append(now - planning_began)
        if not follows:
            self._began = now

    def ended(self, num_tokens: int, reading_began: float) -> None:
        """Note that a step's results are there, and that the next one begins."""
        now = self._clock()
        times = self._steps.setdefault(num_tokens.bit_length(), collections.deque(maxlen=_LATELY))
        if now - reading_began > _IDLE_S:
            times.append(now - self._began)
        elif times:
            times.append(_SHORTEN * min(times))
        self._began = now

    def _is_shared(self, now: float) -> bool:
        return sum(now - at < _SHARED_S for at in self._asked.values()) > 1
