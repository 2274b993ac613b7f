"""Gauges of an engine, read from it when they are scraped."""

import time
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from serving.engine.metrics.stats import EngineStats


class Gauges:
    """A collector that reads the engine when it is asked, so that no value is stale."""

    def __init__(
        self,
        labels: Mapping[str, str],
        cache_config: Mapping[str, str],
        max_loras: int,
        stats: Callable[[], EngineStats],
    ):
        self._labels, self._cache_config = dict(labels), dict(cache_config)
        self._max_loras, self.stats = max_loras, stats

    def describe(self) -> list[Metric]:
        """Return nothing: the registry must not call the engine when we register."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield every gauge, and the counters that the scheduler keeps itself."""
        stats = self.stats()
        yield from self._plain(stats)
        yield self._one(
            "vllm:cache_config_info",
            "Configuration of the KV cache; always 1.",
            self._cache_config,
            1.0,
        )
        yield self._lora_info(stats)
        reasons = {"capacity": stats.waiting - stats.waiting_for_adapter}
        reasons["deferred"] = stats.waiting_for_adapter
        yield self._family(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait: for capacity, or deferred for an adapter's slot or host memory.",
            "reason",
            reasons,
        )
        states = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._family(
            "vllm:engine_sleep_state",
            "Sleep state of the engine; it is always awake.",
            "sleep_state",
            states,
        )
        kinds = GaugeMetricFamily(
            "lora_jax:adapter_bytes", "Host memory of loaded adapters, in bytes.", labels=["kind"]
        )
        for kind, size in (stats.adapter_bytes or {"lora": 0}).items():
            kinds.add_metric([kind], size)
        yield kinds
        pool = stats.pool
        free = pool.total_bytes - pool.kv_bytes - pool.adapter_bytes
        shares = GaugeMetricFamily(
            "lora_jax:page_pool_bytes",
            "Bytes of the page pool by owner: kv, adapters or free.",
            labels=["owner"],
        )
        for owner, size in {
            "kv": pool.kv_bytes,
            "adapters": pool.adapter_bytes,
            "free": free,
        }.items():
            shares.add_metric([owner], size)
        yield shares

    def _plain(self, stats: EngineStats) -> Iterable[Metric]:
        """Return the numbers of an engine that stand alone, vllm's names first."""
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences that run.", stats.running),
            ("vllm:num_requests_waiting", "Sequences that wait.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Fraction of KV pages in use, 0 to 1.", stats.kv_usage),
        ):
            yield self._one(name, text, {}, value)
        yield from self._counters_of_vllm(stats)
        yield from _own_gauges(stats)
        yield CounterMetricFamily(
            "lora_jax:page_pool_evictions",
            "Adapters and KV extents that were evicted to free pages of the pool.",
            value=stats.pool.given,
        )
        yield CounterMetricFamily(
            "lora_jax:adapter_swaps", "Loads of an adapter into a slot.", value=stats.adapter_swaps
        )

    def _counters_of_vllm(self, stats: EngineStats) -> Iterable[Metric]:
        for name, text, value in (
            (
                "vllm:prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_queries,
            ),
            (
                "vllm:prefix_cache_hits",
                "Prompt tokens found in the prefix cache.",
                stats.prefix_hits,
            ),
            (
                "vllm:external_prefix_cache_queries",
                "Prompt tokens looked up in host memory.",
                stats.host_pages.queries,
            ),
            (
                "vllm:external_prefix_cache_hits",
                "Prompt tokens found in host memory.",
                stats.host_pages.hits,
            ),
            (
                "vllm:mm_cache_queries",
                "Images looked up in the encoder cache.",
                stats.image_stats.queries,
            ),
            ("vllm:mm_cache_hits", "Images found in the encoder cache.", stats.image_stats.hits),
            (
                "vllm:num_preemptions",
                "Preemptions; a preempted sequence is computed again.",
                stats.preemptions,
            ),
        ):
            counter = CounterMetricFamily(name, text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter

    def _one(self, name: str, text: str, extra: Mapping[str, str], value: float) -> Metric:
        labels = {**extra, **self._labels}
        gauge = GaugeMetricFamily(name, text, labels=list(labels))
        gauge.add_metric(list(labels.values()), value)
        return gauge

    def _family(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=[*self._labels, label])
        for key, value in values.items():
            gauge.add_metric([*self._labels.values(), key], value)
        return gauge

    def _lora_info(self, stats: EngineStats) -> Metric:
        """One series, whatever happens: gateways read only the newest."""
        labels = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        gauge = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Names of adapters on the device (running), and of those that requests wait for.",
            labels=labels,
        )
        names = (",".join(stats.waiting_adapters), ",".join(stats.resident_adapters))
        gauge.add_metric([str(max(1, self._max_loras)), *names], time.time())
        return gauge


def _own_gauges(stats: EngineStats) -> Iterable[Metric]:
    for name, text, value in (
        ("adapter_slots_used", "Adapter slots in use.", stats.adapter_slots_used),
        ("adapter_slots_total", "Adapter slots of the device.", stats.adapter_slots_total),
        (
            "encoder_rows_used",
            "Rows of the encoder cache in use, one per token of an image.",
            stats.image_stats.rows_used,
        ),
        ("encoder_rows_total", "Rows of the encoder cache.", stats.image_stats.rows_total),
        ("kv_host_pages_used", "KV pages in host memory.", stats.host_pages.used),
        ("kv_host_pages_total", "KV pages that host memory has room for.", stats.host_pages.total),
        ("adapters_loaded", "Names of adapters in host memory.", stats.adapters_loaded),
        (
            "adapter_device_bytes",
            "Device memory of rank rows and experts in use, in bytes.",
            stats.adapter_device_bytes,
        ),
        (
            "expert_page_bytes",
            "Device memory of base and ESFT experts, in bytes of whole pages.",
            stats.expert_page_bytes,
        ),
        (
            "compilations_after_warmup",
            "Programs that the engine compiled after its start; 0 is expected.",
            stats.compilations_after_warmup,
        ),
    ):
        yield GaugeMetricFamily(f"lora_jax:{name}", text, value=value)
