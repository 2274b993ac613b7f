"""Reads an adapter folder; the files in it say whether it is LoRA or ESFT. No jax."""

import dataclasses
from pathlib import Path

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.formats import esft_format, peft_format
from lora_jax.adapters.formats.file_layouts import FileLayouts
from lora_jax.adapters.formats.folder import AdapterFolder
from lora_jax.adapters.formats.head_format import HEAD_FILE
from lora_jax.adapters.target_modules import check_open
from lora_jax.adapters.weights import AnyWeights

CONFIG_FILES = (peft_format.CONFIG_FILE, esft_format.CONFIG_FILE)  # one of them makes an adapter


@dataclasses.dataclass(frozen=True)
class AdapterReadLimits:
    """Limits of an adapter; more is a ValueError naming both numbers."""

    max_file_bytes: int = 4 << 30
    max_rank: int = 512


def check(path: Path, limits: AdapterReadLimits | None = None) -> None:
    """Raise what `read` raises for the names of a folder's files, its config and its rank.

    No weights are read, and no model is needed: a server asks before it loads one.
    """
    limits, folder = limits or AdapterReadLimits(), AdapterFolder(path)
    if esft_format.CONFIG_FILE in folder.files():
        esft_format.check(folder)
        return
    has_head = HEAD_FILE in peft_format.check_files(folder)
    config = peft_format.read_config(folder, has_head=has_head, brings=True)
    if config.rank > limits.max_rank and not config.rank_pattern:
        raise ValueError(
            f"{peft_format.CONFIG_FILE}: rank {config.rank} is above the limit of "
            f"{limits.max_rank}; max_lora_rank sets it."
        )


def check_fits(
    path: Path,
    catalogue: LoraCatalogue,
    *,
    base_names: tuple[str, ...] = (),
    limits: AdapterReadLimits | None = None,
) -> None:
    """Raise what `read` raises for tensors that a LoRA adapter has, without reading their values.

    Of what is no plain LoRA nothing is said. OSError for a file that cannot be read.
    """
    if esft_format.CONFIG_FILE in AdapterFolder(path).files():
        return
    limits = limits or AdapterReadLimits()
    most = peft_format.PeftReadLimits(limits.max_file_bytes, limits.max_rank)
    given = {"base_names": base_names, "limits": most}
    check_open(peft_format.check_shapes(path, catalogue.opened(), **given), catalogue)


def read(
    path: Path,
    catalogue: LoraCatalogue,
    *,
    base_names: tuple[str, ...] = (),
    limits: AdapterReadLimits | None = None,
    root: Path | None = None,
    layouts: FileLayouts | None = None,
) -> AnyWeights:
    """Return the adapter in the folder `path`, which with `root` must lie inside it.

    `layouts` are those known of earlier LoRA files (peft_format.read). Raises FileNotFoundError
    when there is no such folder, and ValueError naming the file, key or tensor for everything
    else; see peft_format.read and esft_format.read.
    """
    limits = limits or AdapterReadLimits()
    folder = AdapterFolder(path, root)
    files = folder.files()
    if esft_format.CONFIG_FILE in files:
        if HEAD_FILE in files:
            raise ValueError(f"{HEAD_FILE} would be lost: an ESFT adapter has no task head here.")
        most = esft_format.EsftReadLimits(limits.max_file_bytes)
        return esft_format.read(path, catalogue.opened(), limits=most, root=root)
    most = peft_format.PeftReadLimits(limits.max_file_bytes, limits.max_rank)
    given = {"base_names": base_names, "limits": most, "layouts": layouts}
    found = peft_format.read_folder(folder, catalogue.opened(), **given)
    check_open(found.sites.keys() | found.gains.keys(), catalogue)
    return found
