"""Registry of an engine's adapters and the sums of them: limits, and what the device can hold."""

import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.entries import AdapterEntry, EvictedAdapter, RegistryLimits
from lora_jax.adapters.registry import AdapterRegistry
from lora_jax.adapters.weights import AnyWeights
from lora_jax.config import ModelConfig
from lora_jax.hub_folder import folder_name
from serving.api.config import EngineConfig
from serving.api.load_format import WeightSource
from serving.engine.parts.early_checks import limits_of
from serving.loading.compositions import Compositions
from serving.loading.residencies import Residencies
from serving.lora_server.sides import RemoteSide

logger = logging.getLogger(__name__)

_WARNINGS_KEPT = 4096
NO_SUM_BEHIND_A_SERVER = (
    "Adapters are not composed where a LoRA Server holds a part of them; ask for one adapter."
)


class Base(Protocol):
    """A model that is loaded, as far as its adapters are concerned."""

    @property
    def source(self) -> WeightSource: ...

    @property
    def catalogue(self) -> LoraCatalogue: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def remote(self) -> RemoteSide | None: ...


def make_registry(
    config: EngineConfig,
    base: Base,
    residencies: Residencies,
    on_read: Callable[[float], None] = lambda seconds: None,
    fitted: Callable[[AnyWeights], AnyWeights] = lambda weights: weights,
) -> tuple[AdapterRegistry, Compositions]:
    """Return the adapters by name and the sums of them; the residencies check and keep them.

    `on_read` is told how many seconds each read from the disk took; `fitted` may refuse weights.
    """

    base_name, original = folder_name(config.model), base.config.original
    read_files = base.source.read_adapter  # not `base`: its model goes with the engine's end

    def read(*given: Any, **more: Any) -> AnyWeights:
        begun = time.perf_counter()
        # Adapters name the base as its folder, whatever name it is served under, or the model
        # that a quantised folder was made of.
        named = (base_name,) if original is None else (base_name, original)
        more["base_names"] = (*more.get("base_names", ()), *named)
        weights = read_files(*given, **more)
        on_read(time.perf_counter() - begun)
        for text in weights.report.warnings:
            warn(weights.report.folder, text)
        return weights

    @functools.lru_cache(_WARNINGS_KEPT)  # once for each, however often it is read
    def warn(folder: str, text: str) -> None:
        logger.warning("Adapter in folder %s: %s", folder, text)

    most = config.max_cpu_loras
    if most is not None and most < config.max_loras:
        logger.warning(
            "max_cpu_loras is %d, max_loras %d: an adapter that leaves host memory leaves the "
            "device too; at most %d are ready at a time. Raise max_cpu_loras or lower max_loras.",
            *(most, config.max_loras, most),
        )
    registry = AdapterRegistry(
        base.catalogue,
        base_names=(config.model_name,),
        lora_dir=config.lora_dir,
        limits=limits_of(config),
        check=residencies.check_fits,
        keep=lambda weights: residencies.keep(fitted(weights)),
        read=read,
    )
    compositions = Compositions(
        residencies.check_fits,
        residencies.keep_composed,
        max_rank=config.max_lora_rank,
        max_bytes=config.max_total_adapter_bytes // 4,
        refused=None if base.remote is None else NO_SUM_BEHIND_A_SERVER,
    )
    registry.set_in_use(residencies.in_use)
    residencies.call_on_drop(registry.line.changed)
    compositions.set_in_use(residencies.in_use)
    return registry, compositions


def load_adapters(
    registry: AdapterRegistry,
    adapters: Mapping[str, str | os.PathLike[str]],
    pinned: Collection[str] = (),
) -> None:
    """Load the operator's adapters, with a line of the log for each."""
    registry.load_all(adapters, pinned)
    by_name = {adapter.name: adapter for adapter in registry.known()}  # some were evicted again
    for name in adapters:
        report = by_name[name].report
        logger.info(
            "Adapter %s: %s, %s, %.2f MB, sha256 %s.",
            name,
            report.kind,
            f"{sum(map(len, report.experts.values()))} experts"
            if report.experts
            else f"rank {report.max_rank}, {len(report.modules)} modules",
            report.weight_bytes / 1e6,
            report.digest[:12],
        )
    if line := host_shortage_line(registry.limits, list(map(by_name.__getitem__, adapters))):
        logger.warning(line)


def host_shortage_line(
    limits: RegistryLimits, given: Sequence[AdapterEntry | EvictedAdapter]
) -> str | None:
    """Return the log line that host memory holds fewer adapters than were given; None: all."""
    held = sum(isinstance(one, AdapterEntry) for one in given)
    if held == len(given):
        return None
    needed = sum({one.digest: one.report.weight_bytes for one in given}.values())
    limit = f"max_total_adapter_bytes={limits.max_total_bytes}"
    if limits.max_in_memory is not None:
        limit += f", max_cpu_loras={limits.max_in_memory}"
    return (
        f"Host memory for adapters ({limit}) holds {held} of the {len(given)} that were given: the "
        "others are read from their files when requests name them, and those requests wait while "
        f"adapters in use take all. All {len(given)} take {needed} bytes."
    )
