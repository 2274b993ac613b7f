"""Errors of the adapter registry. No jax."""

RETRY_AFTER_S = 1.0
_MOST_SHOWN = 20  # names in a message
_ANEW = "load it again in place, or unload it first."


class AdapterNotFound(KeyError):
    """No adapter of this name; `name`, and `known` lists the others, evicted ones included."""

    def __init__(self, name: str, known: tuple[str, ...], why: str = ""):
        super().__init__(name)
        self.name, self.why, self._known = name, why, known

    @property
    def known(self) -> tuple[str, ...]:
        """The known names, sorted only here: a name that is read on use is not found first."""
        return tuple(sorted(self._known))

    def __str__(self) -> str:
        if self.why:
            return f"The adapter {self.name[:80]!r} was not found: {self.why}"
        names = ", ".join(self.known[:_MOST_SHOWN]) or "none"
        if len(self._known) > _MOST_SHOWN:
            names += f" and {len(self._known) - _MOST_SHOWN} more"
        return (
            f"The adapter {self.name[:80]!r} does not exist. Known: {names}. "
            "load_adapter(name, folder) loads one."
        )


class AdapterRejected(ValueError):
    """The adapter or its path is not acceptable; nothing was changed."""

    def about(self, name: str) -> "AdapterRejected":
        """Return the same error with the adapter's name in front."""
        return AdapterRejected(f"Adapter {name!r}: {self}")


class AdapterExists(ValueError):
    """The name is taken and replacing was not asked for; nothing was changed."""


class RegistryBusy(AdapterRejected):
    """No room or no permit for a load now; the same load may succeed after `retry_after_s`.

    `of_key`: the limit is that of the caller, not the server's. The message names the limit, never
    what others hold.
    """

    def __init__(self, message: str, retry_after_s: float = RETRY_AFTER_S, *, of_key: bool = False):
        super().__init__(message)
        self.retry_after_s, self.of_key = retry_after_s, of_key

    def about(self, name: str) -> "RegistryBusy":
        """Return the same error with the adapter's name in front."""
        return RegistryBusy(f"Adapter {name!r}: {self}", self.retry_after_s, of_key=self.of_key)


class HostFull(RegistryBusy):
    """Host memory for adapters is taken by adapters in use; the request may wait for room."""

    def about(self, name: str) -> "HostFull":
        """Return the same error with the adapter's name in front."""
        return HostFull(f"Adapter {name!r}: {self}", self.retry_after_s)

    def after(self, seconds: float) -> "HostFull":
        """Return the error of a request that has waited for so long."""
        if not seconds:
            return self
        return HostFull(f"{self} The request has waited for {seconds:g} s.", self.retry_after_s)


def files_changed(name: str) -> AdapterRejected:
    """Return the error of files that are others than those that were loaded under a name."""
    return AdapterRejected(f"Adapter {name!r}: its files have changed since it was loaded; {_ANEW}")


def files_gone(name: str) -> AdapterRejected:
    """Return the error of a name that was loaded, and whose folder is not there any more."""
    return AdapterRejected(f"Adapter {name!r}: its folder has gone since it was loaded; {_ANEW}")
