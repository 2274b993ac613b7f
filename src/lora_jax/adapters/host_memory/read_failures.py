"""Folders that could not be read and are not read again for some seconds. No jax."""

from collections.abc import Callable

from lora_jax.adapters.registry_errors import AdapterRejected, RegistryBusy

_REMEMBER_S = 10.0


class ReadFailures:
    """Errors by name, for some seconds; any thread may call it."""

    def __init__(self, most: int, clock: Callable[[], float]):
        """Errors that are too old go when there are `most`."""
        self._most, self._clock = most, clock
        self._failures: dict[str, tuple[float, AdapterRejected]] = {}  # until when

    def check(self, name: str) -> None:
        """Raise the error of a name while it is remembered."""
        until, failure = self._failures.get(name, (0.0, None))
        if failure is not None and self._clock() < until:
            raise failure
        self._failures.pop(name, None)

    def remember(self, name: str, error: AdapterRejected) -> None:
        """Refuse the name for a while, unless the limit of one caller is the reason."""
        if isinstance(error, RegistryBusy) and error.of_key:
            return  # others may load it
        now = self._clock()
        if len(self._failures) >= self._most:
            self._failures = {n: f for n, f in tuple(self._failures.items()) if f[0] > now}
        wait_s = error.retry_after_s if isinstance(error, RegistryBusy) else _REMEMBER_S
        self._failures[name] = now + wait_s, error

    def forget(self, name: str) -> None:
        """The name was loaded or unloaded."""
        self._failures.pop(name, None)
