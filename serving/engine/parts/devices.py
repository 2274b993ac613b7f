"""Devices of an engine: how many this process needs, and the split of the model over them."""

import contextlib
import logging
from pathlib import Path

import jax

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.local_widths import LocalWidths
from lora_jax.models.loader import read_config
from lora_jax.models.split import make_split
from lora_jax.ops.native import cpu_features
from lora_jax.sharding import Split
from serving.api.config import EngineConfig
from serving.lora_server.shards import local_catalogue
from serving.lora_server.sides import RemoteSide
from serving.runtime.collectives import bound_collectives
from serving.runtime.gang import Gang

# Beginnings of the features by which a CPU's kernels are compiled.
_OF_KERNELS = ("avx", "amx", "fma", "f16c", "sse4", "asimd", "sve", "bf16", "i8mm")

logger = logging.getLogger(__name__)


def split_of(config: EngineConfig, gang: Gang | None = None) -> Split | None:
    """Return the split that the config asks for, None for one device; nothing is loaded yet.

    On a CPU as many devices are made as are asked for, if jax has not made its own before; the
    members of a gang have an equal part each. Raises ValueError for a model that cannot be split
    so, and where there are too few devices.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return None
    model = read_config(Path(config.model))
    bound_collectives()
    if gang is None:
        make_cpu_devices(size)
    else:
        part = size // gang.size
        make_cpu_devices(part, exactly=True)
        gang.start_jax()
        _require_part(part, size)
        _require_kind(gang)
    return make_split(model, size, expert_parallel=config.enable_expert_parallel)


def local_widths(split: Split | None) -> LocalWidths | None:
    """Return the widths of adapters on one device of a split; None without one."""
    if split is None:
        return None
    whole = split.experts == "ep", split.vocab_multiple, split.attention_output == "whole"
    return LocalWidths(split.size, *whole)


def held_locally(
    catalogue: LoraCatalogue, remote: RemoteSide | None, widths: LocalWidths | None
) -> tuple[LoraCatalogue, int]:
    """Return the modules of which slots hold every adapter, and the number held whole.

    In a split model they are as one device has them.
    """
    num_whole = 0
    if remote is not None:
        catalogue, num_whole = local_catalogue(catalogue, remote.link.layout), remote.num_local
    return (catalogue if widths is None else widths.catalogue(catalogue)), num_whole


def log_devices(split: Split | None) -> None:
    """Log where the model lies."""
    if split is None:
        logger.info("Mesh: one device, %s.", jax.devices()[0])
        return
    names = ", ".join(map(str, split.mesh.devices.flat))
    by = {"ep": "whole experts", "tp": "a part of each expert"}[split.experts]
    exchange = "the GPUs' own all-gather" if split.group else "jax.lax.all_gather"
    logger.info(
        "Mesh: %d devices (%s); %s on each; exchange by %s.", split.size, names, by, exchange
    )


def _require_part(part: int, size: int) -> None:
    """Raise ValueError unless this process has its part of the devices, and no others.

    A model lies on the first of all devices, which are those of the first processes.
    """
    found = jax.local_devices()
    if len(found) != part:
        raise ValueError(
            f"tensor_parallel_size {size} takes {part} devices of each node, and this one has "
            f"{len(found)} ({found[0].device_kind}): choose another size, or let each process see "
            f"{part} (CUDA_VISIBLE_DEVICES)."
        )


def _require_kind(gang: Gang) -> None:
    """Raise ValueError where this host's CPU computes, and its kernels may give other bits.

    Each member samples for itself: with other bits they would go on with other tokens.
    """
    own = sorted(name for name in cpu_features() if name.startswith(_OF_KERNELS))
    first = gang.shared(own)
    if jax.default_backend() == "cpu" and own != first:
        other = ", ".join(sorted(set(own) ^ set(first)))
        raise ValueError(
            f"The CPUs of rank 0 and of this host differ in {other}: their results would have "
            "other bits. Give an instance hosts of one kind."
        )


def make_cpu_devices(size: int, *, exactly: bool = False) -> None:
    """Have jax make so many CPU devices; it does so at its start only, and refuses later.

    Where there are to be more already they stay, unless `exactly` so many are asked for.
    """
    if exactly or max(1, jax.config.jax_num_cpu_devices) < size:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", size)
