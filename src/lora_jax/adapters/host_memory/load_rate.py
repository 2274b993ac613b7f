"""Limit of adapter loads in a minute. No jax."""

import collections
from collections.abc import Callable

from lora_jax.adapters.registry_errors import RegistryBusy


class LoadRate:
    """Permits for loads; one thread at a time uses it."""

    def __init__(self, per_minute: int, clock: Callable[[], float]):
        self._per_minute, self._clock = per_minute, clock
        self._times: collections.deque[float] = collections.deque()

    def take(self) -> None:
        """Count one load; RegistryBusy says when there is a permit again."""
        now, times = self._clock(), self._times
        while times and now - times[0] >= 60:
            times.popleft()
        if len(times) >= self._per_minute:
            raise RegistryBusy(
                f"More than {self._per_minute} adapter loads in one minute.",
                retry_after_s=max(1.0, 60 - (now - times[0])),
            )
        times.append(now)
