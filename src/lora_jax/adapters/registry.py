"""Adapters by name: validated before they are published, replaced as a whole, confined. No jax.

An entry never changes: a reload makes a new entry with a higher generation, and requests that
hold the old entry finish on its weights. Caches key on `digest`, so that weights decide, not names.
"""

import collections
import dataclasses
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lora_jax.adapters import reader
from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.weights import AdapterReport, AnyWeights

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_READERS = 16  # folders of the operator's that are read side by side, at most
_REMEMBER_FAILURE_S = 10.0  # a broken folder is not read again for each request that names it


class AdapterNotFound(KeyError):
    """No adapter of this name; `name`, and `known` lists the loaded ones."""

    def __init__(self, name: str, known: tuple[str, ...], why: str = ""):
        super().__init__(name)
        self.name, self.known, self.why = name, known, why

    def __str__(self) -> str:
        if self.why:
            return f"The adapter {self.name[:80]!r} was not found: {self.why}"
        known = ", ".join(self.known) or "none"
        return f"The adapter {self.name[:80]!r} does not exist. Known: {known}."


class AdapterRejected(ValueError):
    """The adapter or its path is not acceptable; nothing was changed."""


class AdapterExists(ValueError):
    """The name is taken and replacing was not asked for; nothing was changed."""


@dataclasses.dataclass(frozen=True)
class RegistryLimits:
    """Limits of the registry. Violations are AdapterRejected naming both numbers."""

    max_adapters: int = 4096
    max_total_bytes: int = 8 << 30  # weights of all loaded adapters, on the host
    max_file_bytes: int = 4 << 30
    max_rank: int = 512
    loads_per_minute: int = 600


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterEntry:
    """One loaded adapter. `generation` grows with every publish and unload of the registry."""

    name: str
    kind: str  # "lora" or "esft"
    digest: str
    generation: int
    weights: AnyWeights
    pinned: bool
    path: str  # relative to the adapter directory, or the operator's folder without its directory
    folder: str = ""  # where the files are, in full; never shown to clients

    @property
    def report(self) -> AdapterReport:
        return self.weights.report


class AdapterRegistry:
    """Names to adapters; any thread may call it. Loads run one at a time, look-ups never wait."""

    def __init__(
        self,
        catalogue: LoraCatalogue,
        *,
        base_names: tuple[str, ...] = (),
        lora_dir: str | os.PathLike[str] | None = None,
        limits: RegistryLimits | None = None,
        check: Callable[[AnyWeights], None] | None = None,
        keep: Callable[[AnyWeights], AnyWeights] | None = None,
        read: Callable[..., AnyWeights] = reader.read,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`base_names` are reserved (the served base model); `lora_dir` is the root for clients.

        `check` raises ValueError for adapters that can never run, such as one too big for the
        device (AbstractAllocator.check_fits). `keep` returns what of an adapter stays here, and
        what `check` and the limits are asked about. `read` is reader.read or another of its kind.
        """
        self._catalogue = catalogue
        self._base_names = base_names
        self._root = Path(lora_dir) if lora_dir is not None else None
        self._limits = limits or RegistryLimits()
        self._check = check or (lambda weights: None)
        self._keep = keep or (lambda weights: weights)
        self._read_folder = read
        self._clock = clock
        self._lock = threading.Lock()  # guards the fields below, held for moments
        self._loading = threading.RLock()  # one load at a time, held while files are read
        self._entries: dict[str, AdapterEntry] = {}
        self._generation = 0
        self._load_times: collections.deque[float] = collections.deque()
        self._failures: dict[str, tuple[float, str]] = {}
        self._refused: dict[str, str] = {}  # names that only an explicit load brings back

    def load(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        replace: bool = False,
        pinned: bool = False,
        confined: bool = True,
        digest: str | None = None,
    ) -> AdapterEntry:
        """Read, check and publish an adapter; on any error the old entry of the name stays.

        `digest` repeats a load of these very files: others are refused, and it does not count in
        the limit of loads in a minute.

        With `confined` (every path that came over the network) the path is relative to lora_dir
        and must stay inside it, links included; the operator's own paths pass confined=False.
        Raises AdapterRejected, AdapterExists, or AdapterNotFound when there is no such folder.
        """
        self._check_name(name)
        with self._loading:
            self._check_free(name, replace)
            folder = self._folder(path, confined)
            if digest is None:
                self._take_load_permit()
            weights = self._read(name, folder, self._root if confined else None)
            if digest is not None and weights.digest != digest:
                raise AdapterRejected(
                    f"Adapter {name!r}: its files have changed, sha256 {weights.digest[:12]}, "
                    f"not {digest[:12]}."
                )
            shown = self._shown_path(folder, confined)
            with self._lock:
                return self._publish(name, weights, pinned, shown, os.path.realpath(folder))

    def load_all(self, paths: Mapping[str, str | os.PathLike[str]]) -> None:
        """Read and publish the operator's own folders, some side by side, in the order given.

        Raises what `load` raises for the first that is not acceptable; those before it stay. The
        limit of loads in a minute is for what comes over the network.
        """
        with self._loading, ThreadPoolExecutor(_READERS) as pool:
            for names in itertools.batched(paths, _READERS):
                for name in names:
                    self._check_name(name)
                folders = [Path(paths[name]) for name in names]
                read = pool.map(lambda name, folder: self._read(name, folder, None), names, folders)
                for name, folder, weights in zip(names, folders, read, strict=True):
                    self._check_free(name, replace=False)
                    shown = self._shown_path(folder, confined=False)
                    with self._lock:
                        self._publish(name, weights, False, shown, os.path.realpath(folder))

    def unload(self, name: str) -> AdapterEntry:
        """Remove the name and return what it stood for; raises AdapterNotFound."""
        with self._lock:
            if name not in self._entries:
                raise AdapterNotFound(name, tuple(sorted(self._entries)))
            self._generation += 1
            return self._entries.pop(name)

    def refuse(self, name: str, why: str) -> None:
        """Let `resolve` raise AdapterRejected for this name until `load` is called for it."""
        with self._lock:
            self._refused[name] = why

    def get(self, name: str) -> AdapterEntry:
        """Return the loaded entry of a name; raises AdapterNotFound listing the loaded names."""
        with self._lock:
            if name not in self._entries:
                raise AdapterNotFound(name, tuple(sorted(self._entries)))
            return self._entries[name]

    def resolve(self, name: str) -> AdapterEntry:
        """Return the entry, loading `lora_dir/name` on first use; raises AdapterNotFound.

        A folder that was refused is refused again without reading it for some seconds.
        """
        try:
            return self.get(name)
        except AdapterNotFound:
            if self._root is None or not _NAME.fullmatch(name) or name in self._base_names:
                raise
            if name in self._refused:
                raise AdapterRejected(self._refused[name]) from None
        with self._loading:
            try:
                return self.get(name)  # another thread may have loaded it meanwhile
            except AdapterNotFound:
                if not (self._root / name).is_dir():
                    raise
            when, failure = self._failures.get(name, (0.0, ""))
            if failure and self._clock() - when < _REMEMBER_FAILURE_S:
                raise AdapterRejected(failure)
            try:
                return self.load(name, name)
            except AdapterRejected as error:
                self._failures[name] = self._clock(), str(error)
                raise

    def entries(self) -> tuple[AdapterEntry, ...]:
        """Return all loaded entries in order of name."""
        with self._lock:
            return tuple(self._entries[name] for name in sorted(self._entries))

    @property
    def generation(self) -> int:
        """Number of publishes and unloads so far."""
        return self._generation

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise AdapterRejected(
                f"The adapter name {name[:80]!r} is not 1 to 64 letters, digits, '.', '_' or '-' "
                "with a letter or digit first."
            )
        if name in self._base_names:
            raise AdapterRejected(f"The name {name!r} is the base model's.")

    def _check_free(self, name: str, replace: bool) -> None:
        with self._lock:
            taken = name in self._entries
            if taken and not replace:
                raise AdapterExists(f"The adapter {name!r} is loaded already.")
            if not taken and len(self._entries) >= self._limits.max_adapters:
                raise AdapterRejected(
                    f"{len(self._entries)} adapters are loaded, the limit is "
                    f"{self._limits.max_adapters}."
                )

    def _folder(self, path: str | os.PathLike[str], confined: bool) -> Path:
        if not confined:
            return Path(path)
        if self._root is None:
            raise AdapterRejected("Loading by path needs an adapter directory on the server.")
        return self._root / path

    def _shown_path(self, folder: Path, confined: bool) -> str:
        real = Path(os.path.realpath(folder))
        if not confined or self._root is None:
            return real.name
        return real.relative_to(os.path.realpath(self._root)).as_posix()

    def _take_load_permit(self) -> None:
        now, times = self._clock(), self._load_times
        while times and now - times[0] >= 60:
            times.popleft()
        if len(times) >= self._limits.loads_per_minute:
            raise AdapterRejected(
                f"More than {self._limits.loads_per_minute} adapter loads in one minute."
            )
        times.append(now)

    def _read(self, name: str, folder: Path, root: Path | None) -> AnyWeights:
        limits = reader.ReadLimits(
            max_file_bytes=self._limits.max_file_bytes, max_rank=self._limits.max_rank
        )
        try:
            weights = self._read_folder(
                folder, self._catalogue, base_names=self._base_names, limits=limits, root=root
            )
            weights = self._keep(weights)
            self._check(weights)
        except FileNotFoundError as error:
            known = tuple(entry.name for entry in self.entries())
            raise AdapterNotFound(name, known, str(error)) from None
        except OSError as error:
            raise AdapterRejected(f"Adapter {name!r}: {error.strerror}.") from None
        except ValueError as error:
            raise AdapterRejected(f"Adapter {name!r}: {error}") from None
        return weights

    def _publish(
        self, name: str, weights: AnyWeights, pinned: bool, path: str, folder: str
    ) -> AdapterEntry:
        """Put the entry in place as the last act; the caller holds the lock."""
        others = {e.digest: e.weights for n, e in self._entries.items() if n != name}
        others[weights.digest] = weights
        total = sum(w.report.weight_bytes for w in others.values())
        if total > self._limits.max_total_bytes:
            raise AdapterRejected(
                f"Adapter {name!r}: all adapters together would take {total} bytes, the limit is "
                f"{self._limits.max_total_bytes}."
            )
        self._generation += 1
        entry = AdapterEntry(
            name=name,
            kind=weights.report.kind,
            digest=weights.digest,
            generation=self._generation,
            weights=weights,
            pinned=pinned,
            path=path,
            folder=folder,
        )
        self._entries[name] = entry
        self._refused.pop(name, None)
        return entry
