"""Figures of an engine at one moment, for metrics and the periodic log line."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from serving.api.images import ImageStats
from serving.scheduling.pages.exchange import PoolShares
from serving.scheduling.pages.host_pages import HostPageStats


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Counters and gauges of an engine, for metrics and the periodic log line."""

    running: int = 0  # sequences
    waiting: int = 0
    waiting_for_adapter: int = 0
    kv_usage: float = 0.0  # 0 to 1
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0
    preemptions: int = 0
    image_stats: ImageStats = dataclasses.field(default_factory=ImageStats)
    host_pages: HostPageStats = dataclasses.field(default_factory=HostPageStats)
    pool: PoolShares = dataclasses.field(default_factory=PoolShares)
    prompt_tokens: int = 0  # totals since the start
    generation_tokens: int = 0
    adapters_loaded: int = 0
    adapter_slots_used: int = 0
    adapter_slots_total: int = 0
    adapter_swaps: int = 0
    adapter_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by kind, host
    adapter_device_bytes: int = 0
    expert_page_bytes: int = 0  # physical pages behind the experts; 0 without ESFT
    resident_adapters: tuple[str, ...] = ()  # names, sorted
    waiting_adapters: tuple[str, ...] = ()  # names that requests wait for, sorted
    compilations_after_warmup: int = 0
    steps: int = 0
    # Of each op that was traced: [{implementation, declined: {name: reason}}], of this process.
    implementations: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of looked-up prompt tokens found in the prefix cache, 0 to 1."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0
