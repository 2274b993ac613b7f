"""Folders of adapters: paths of clients confined to a root, weights checked, entries. No jax."""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lora_jax.adapters import reader
from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.entries import AdapterEntry, EvictedAdapter, RegistryLimits
from lora_jax.adapters.formats.peft_format import CONFIG_FILE, WEIGHTS_FILE
from lora_jax.adapters.formats.safetensors_file import header_text
from lora_jax.adapters.registry_errors import AdapterNotFound, AdapterRejected
from lora_jax.adapters.versions import check_name
from lora_jax.adapters.weights import AnyWeights

logger = logging.getLogger(__name__)

_MOST_S = 1.0  # of looks at headers before a model is loaded


class AdapterFolders:
    """Reads folders for a registry; any thread may call it."""

    def __init__(
        self,
        catalogue: LoraCatalogue,
        base_names: tuple[str, ...],
        root: Path | None,
        limits: RegistryLimits,
        *,
        check: Callable[[AnyWeights], None] | None,
        keep: Callable[[AnyWeights], AnyWeights] | None,
        read: Callable[..., AnyWeights],
    ):
        """`root` is that of confined paths; the others are as AdapterRegistry has them."""
        self._catalogue, self._base_names, self._root = catalogue, base_names, root
        self._limits = reader.AdapterReadLimits(
            max_file_bytes=limits.max_file_bytes, max_rank=limits.max_rank
        )
        self._check = check or (lambda weights: None)
        self._keep = keep or (lambda weights: weights)
        self._read = read

    @property
    def has_root(self) -> bool:
        """True if there is a folder for confined paths."""
        return self._root is not None

    def has(self, name: str) -> bool:
        """Return whether the root has a folder of this name."""
        return self._root is not None and (self._root / name).is_dir()

    def folder(self, path: str | os.PathLike[str], confined: bool) -> Path:
        """Return where a path leads; AdapterRejected for a confined one without a root."""
        if not confined:
            return Path(path)
        if self._root is None:
            raise AdapterRejected("Loading by path needs an adapter directory on the server.")
        return self._root / path

    def read(
        self, name: str, folder: Path, confined: bool, on_read: Callable[[AnyWeights], None]
    ) -> AnyWeights:
        """Return what stays of a folder's weights; `on_read` gets them before they are checked.

        Raises FileNotFoundError without such a folder, AdapterRejected for one not acceptable.
        """
        limits, root = self._limits, self._root if confined else None
        try:
            weights = self._read(
                folder, self._catalogue, base_names=self._base_names, limits=limits, root=root
            )
            on_read(weights)
            weights = self._keep(weights)
            self._check(weights)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _rejected(name, folder, f"{error.strerror}.") from None
        except ValueError as error:
            raise _rejected(name, folder, str(error)) from None
        return weights

    def entry(
        self,
        name: str,
        weights: AnyWeights,
        folder: Path,
        confined: bool,
        pinned: bool = False,
        explicit: bool = True,
        known: EvictedAdapter | None = None,
    ) -> AdapterEntry:
        """Return an entry that is not published yet and so has no generation.

        `known` is what the name stood for before its folder was read again.
        """
        real = os.path.realpath(folder) if known is None else known.folder
        return AdapterEntry(
            name=name,
            kind=weights.report.kind,
            digest=weights.digest,
            generation=0,
            weights=weights,
            pinned=pinned,
            path=self._shown_path(real, confined) if known is None else known.path,
            folder=real,
            confined=confined,
            explicit=explicit,
        )

    def _shown_path(self, real: str, confined: bool) -> str:
        """Return what is told of where a folder is."""
        if not confined or self._root is None:
            return os.path.basename(real)
        return Path(real).relative_to(os.path.realpath(self._root)).as_posix()


def check_folders(folders: Mapping[str, str | os.PathLike[str]], limits: RegistryLimits) -> None:
    """Raise what loads of these adapters by name will, as far as names and configs tell.

    Nothing but small files is read: AdapterNotFound for no folder, AdapterRejected for others.
    """
    given = reader.AdapterReadLimits(limits.max_file_bytes, limits.max_rank)
    for name, folder in folders.items():
        check_name(name)
        with _about(name):
            reader.check(Path(folder), given)


def check_tensors(
    folders: Mapping[str, str | os.PathLike[str]],
    limits: RegistryLimits,
    catalogue: LoraCatalogue,
    base_names: tuple[str, ...],
    most_s: float = _MOST_S,
) -> None:
    """Raise what loads of these adapters will, as far as the headers of their files tell.

    Of adapters that look the same, as those that were trained alike, one is looked at: one with all
    experts of a large model takes a second, others milliseconds. After `most_s` seconds the rest is
    left to the loads.
    """
    given, seen = reader.AdapterReadLimits(limits.max_file_bytes, limits.max_rank), set()
    end_s = time.monotonic() + most_s
    for index, (name, folder) in enumerate(folders.items()):
        if time.monotonic() > end_s:
            counts = index, len(folders)
            logger.info("The tensors of %d of %d adapters fit; loads check the others.", *counts)
            return
        look = _look_of(Path(folder))
        if look is not None and look in seen:
            continue
        with _about(name):
            reader.check_fits(Path(folder), catalogue, base_names=base_names, limits=given)
        seen.add(look)


def _look_of(folder: Path) -> tuple[bytes, int, bytes, tuple[str, ...]] | None:
    """Return the header and size of a folder's weights, its config and its names; None without.

    The header is hashed: one with all experts of a large model has megabytes.
    """
    weights = folder / WEIGHTS_FILE
    try:
        header, size = hashlib.sha256(header_text(weights)).digest(), weights.stat().st_size
        return header, size, (folder / CONFIG_FILE).read_bytes(), tuple(sorted(os.listdir(folder)))
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def _about(name: str) -> Iterator[None]:
    """Turn errors of a folder into those of a registry, which name the adapter."""
    try:
        yield
    except FileNotFoundError as error:
        raise AdapterNotFound(name, (), str(error)) from None
    except OSError as error:
        raise AdapterRejected(f"{error.strerror}.").about(name) from None
    except ValueError as error:
        raise AdapterRejected(str(error)).about(name) from None


def _rejected(name: str, folder: Path, why: str) -> AdapterRejected:
    """Return the error of a folder that is not acceptable; the log has where it is."""
    # The reason may quote names of the file: they shall not make lines of their own.
    logger.warning("Adapter %s (%r) was not loaded: %s", name, str(folder), " ".join(why.split()))
    return AdapterRejected(f"Adapter {name!r}: {why}")
