"""Merged weights of an engine: what they do not go with, their memory, and their metrics."""

import logging
import math
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.registry import AdapterRegistry
from lora_jax.adapters.weights import AdapterWeights
from lora_jax.nn.decoder import AbstractCausalLM
from serving.api.config import EngineConfig
from serving.engine.memory.memory_budget import free_device_bytes
from serving.loading.lora_residency import LoraResidency
from serving.loading.mergeable import Mergeable
from serving.loading.residencies import Residencies
from serving.scheduling.merge_modes import MergeModes
from serving.steps.merged_weights import MergedWeights, dense_map_bytes, dense_maps, merge_into

logger = logging.getLogger(__name__)

AUTO, OFF = "auto", "off"


def merge_primary(
    config: EngineConfig, model: AbstractCausalLM, registry: AdapterRegistry
) -> str | None:
    """Merge the adapter that this engine serves alone; return its digest, None: it serves all.

    Raises ValueError for one that is not loaded, or that dense maps cannot stand for.
    """
    name = config.merge_adapter
    if name is None:
        return None
    if not registry.knows(name):
        raise ValueError(f"merge_adapter {name!r} is not among the adapters that are loaded.")
    weights = registry.resolve(name).weights
    maps = {(m.module, m.layer): math.inf for m in dense_maps(model)}
    if not isinstance(weights, AdapterWeights):
        raise ValueError(f"merge_adapter {name!r} is no LoRA adapter; only those are merged.")
    if why := Mergeable(maps, mixture=False).why_not(weights):
        raise ValueError(f"merge_adapter {name!r} cannot be merged: {why}")
    merge_into(model, weights, config.max_lora_rank)
    logger.info("Adapter %s is merged into the weights; this engine serves it alone.", name)
    return weights.digest


def make_merged(config: EngineConfig, model: AbstractCausalLM) -> MergedWeights | None:
    """Return the second copy of the dense maps; None without it, or where it has no room."""
    if config.lora_merge == OFF:
        return None
    free, wanted = free_device_bytes(config), dense_map_bytes(model)
    if free is not None and wanted > free:
        logger.warning(
            "lora_merge is off: a second copy of the dense maps takes %.1f MB, and %.1f MB are "
            "free (gpu_memory_utilization).",
            wanted / 1e6,
            free / 1e6,
        )
        return None
    merged = MergedWeights(model, config.max_lora_rank)
    logger.info(
        "Merged weights: %s, a second copy of %s, %.1f MB.",
        config.lora_merge,
        ", ".join(sorted(merged.modules)),
        merged.num_bytes / 1e6,
    )
    return merged


def make_modes(
    config: EngineConfig, merged: MergedWeights | None, residencies: Residencies
) -> MergeModes | None:
    """Return what gives sequences their weights; None where all have the plain ones."""
    if merged is None:
        return None
    lora = residencies.of(AdapterKind.LORA)
    assert isinstance(lora, LoraResidency), "a LoRA Server was refused"
    mixture = config.lora_merge == AUTO
    lora.merge_into(Mergeable(merged.norms, mixture=mixture))
    return MergeModes(lora, mixture=mixture, theta=config.lora_merge_theta)


class MergeCollector:
    """Steps by mode, switches, and which adapter is merged; read when they are scraped."""

    def __init__(self, merged: MergedWeights):
        self._merged = merged

    def describe(self) -> list[Metric]:
        """Return nothing: the series are made anew each time."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield the families."""
        steps = CounterMetricFamily(
            "lora_jax:merge_steps", "Steps by mode: plain, merged or mixture.", labels=["mode"]
        )
        for mode, count in self._merged.steps.items():
            steps.add_metric([mode], count)
        yield steps
        text = "Times that another adapter was merged into the weights."
        switches = CounterMetricFamily("lora_jax:merge_switches", text)
        switches.add_metric([], self._merged.num_switches)
        yield switches
        text = "1 for the adapter that was merged last."
        info = GaugeMetricFamily("lora_jax:merged_adapter_info", text, labels=["adapter"])
        if self._merged.merged is not None:
            info.add_metric([self._merged.merged.name], 1)
        yield info


def watch_merging(registry: CollectorRegistry, merged: MergedWeights | None) -> None:
    """Show merged weights in the metrics, where there are any."""
    if merged is not None:
        registry.register(MergeCollector(merged))
