"""Registry of an engine's adapters and the sums of them: limits, and what the device can hold."""

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.adapters.local_widths import LocalWidths
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.registry import AdapterRegistry, RegistryLimits
from lora_jax.adapters.row_copies import Copier, pin_matrices
from lora_jax.adapters.weights import AdapterWeights, AnyWeights, ExpertWeights
from serving.api.config import EngineConfig
from serving.api.load_format import WeightSource
from serving.loading.compositions import Compositions
from serving.loading.esft_parts import EsftParts
from serving.lora_server.instance import InstanceSide

logger = logging.getLogger(__name__)

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
    def esft(self) -> EsftParts | None: ...

    @property
    def remote(self) -> InstanceSide | None: ...

    @property
    def widths(self) -> LocalWidths | None: ...


def make_registry(
    config: EngineConfig,
    base: Base,
    allocator: SlotAllocator,
    copier: Copier | None,
    on_read: Callable[[float], None] = lambda seconds: None,
) -> tuple[AdapterRegistry, Compositions]:
    """Return the adapters by name and the sums of them, with the checks of this engine.

    `on_read` is told how many seconds each read from the disk took.
    """

    def check_fits(weights: AnyWeights) -> None:
        if not isinstance(weights, ExpertWeights):
            allocator.check_fits(weights)
        elif base.esft is None:
            raise ValueError(
                "an ESFT adapter; this server has no room for any (max_esft_adapters)."
            )
        else:
            base.esft.room.allocator.check_fits(weights)

    def kept(weights: AnyWeights) -> AnyWeights:
        if base.widths is not None and isinstance(weights, AdapterWeights):
            return base.widths.adapter(weights, base.catalogue)
        return pin_matrices(weights if base.remote is None else base.remote.keep(weights), copier)

    def read(*given: Any, **more: Any) -> AnyWeights:
        begun = time.perf_counter()
        weights = base.source.read_adapter(*given, **more)
        on_read(time.perf_counter() - begun)
        return weights

    limits = RegistryLimits(
        max_total_bytes=config.max_total_adapter_bytes,
        max_in_memory=config.max_cpu_loras,
        max_file_bytes=config.max_adapter_bytes,
        max_rank=config.max_lora_rank,
        loads_per_minute=config.max_adapter_loads_per_minute,
    )
    registry = AdapterRegistry(
        base.catalogue,
        base_names=(config.model_name,),
        lora_dir=config.lora_dir,
        limits=limits,
        check=check_fits,
        keep=kept,
        read=read,
    )
    compositions = Compositions(
        check_fits,
        lambda weights: pin_matrices(weights, copier),  # the parts are as `kept` left them
        max_rank=config.max_lora_rank,
        max_bytes=config.max_total_adapter_bytes // 4,
        refused=None if base.remote is None else NO_SUM_BEHIND_A_SERVER,
    )
    return registry, compositions


def load_adapters(
    registry: AdapterRegistry, adapters: Mapping[str, str | os.PathLike[str]]
) -> None:
    """Load the operator's adapters, with a line of the log for each."""
    registry.load_all(adapters)
    known = {adapter.name: adapter for adapter in registry.known()}  # some were evicted again
    for name in adapters:
        report = known[name].report
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
