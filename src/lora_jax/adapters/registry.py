"""Adapters by name: validated before they are published, replaced as a whole, confined. No jax.

An entry never changes: a reload makes a new entry with a higher generation, and requests that
hold the old entry finish on its weights. Caches key on `digest`, so that weights decide, not names.
"""

import dataclasses
import os
import time
from collections.abc import Callable

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.weights import AdapterReport, AdapterWeights


class AdapterNotFound(KeyError):
    """No adapter of this name; `name`, and `known` lists the loaded ones."""

    def __init__(self, name: str, known: tuple[str, ...]):
        super().__init__(name)
        self.name, self.known = name, known

    def __str__(self) -> str:
        return (
            f"The adapter {self.name!r} does not exist. Known: {', '.join(self.known) or 'none'}."
        )


class AdapterRejected(ValueError):
    """The adapter or its path is not acceptable; nothing was changed."""


class AdapterExists(ValueError):
    """The name is taken and replacing was not asked for; nothing was changed."""


@dataclasses.dataclass(frozen=True)
class RegistryLimits:
    """What the registry accepts. Violations are AdapterRejected naming both numbers."""

    max_adapters: int = 4096
    max_total_bytes: int = 8 << 30  # weights of all loaded adapters, on the host
    max_file_bytes: int = 4 << 30
    max_rank: int = 512
    loads_per_minute: int = 600


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterEntry:
    """One loaded adapter. `generation` grows with every publish and unload of the registry."""

    name: str
    kind: str  # "lora"
    digest: str
    generation: int
    weights: AdapterWeights
    pinned: bool
    path: str  # as the operator or client named it: relative to the root, or a folder's own name

    @property
    def report(self) -> AdapterReport:
        return self.weights.report


class AdapterRegistry:
    """Names to adapters; any thread may call it."""

    def __init__(
        self,
        catalogue: LoraCatalogue,
        *,
        base_names: tuple[str, ...] = (),
        lora_dir: str | os.PathLike[str] | None = None,
        limits: RegistryLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`base_names` are reserved (the served base model); `lora_dir` is the root for clients."""
        raise NotImplementedError

    def load(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        pinned: bool = False,
        confined: bool = True,
    ) -> AdapterEntry:
        """Read, check and publish an adapter; on any error the old entry of the name stays.

        With `confined` (every path that came over the network) the path is relative to lora_dir
        and must stay inside it, links included; the operator's own paths pass confined=False.
        Raises AdapterRejected, AdapterExists, or AdapterNotFound when there is no such folder.
        """
        raise NotImplementedError

    def unload(self, name: str) -> AdapterEntry:
        """Remove the name and return what it stood for; raises AdapterNotFound."""
        raise NotImplementedError

    def get(self, name: str) -> AdapterEntry:
        """Return the loaded entry of a name; raises AdapterNotFound listing the loaded names."""
        raise NotImplementedError

    def resolve(self, name: str) -> AdapterEntry:
        """Return the entry, loading `lora_dir/name` on first use; raises AdapterNotFound."""
        raise NotImplementedError

    def is_current(self, entry: AdapterEntry) -> bool:
        """Return whether the entry is still what its name stands for."""
        raise NotImplementedError

    def digest_in_use(self, digest: str) -> bool:
        """Return whether any loaded name stands for these weights."""
        raise NotImplementedError

    def entries(self) -> tuple[AdapterEntry, ...]:
        """Return all loaded entries in order of name."""
        raise NotImplementedError

    @property
    def generation(self) -> int:
        """Number of publishes and unloads so far."""
        raise NotImplementedError
