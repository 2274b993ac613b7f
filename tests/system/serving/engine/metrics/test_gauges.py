"""Gauges are the engine's figures at the time of the scrape."""

import dataclasses

from support.cases.metrics_cases import STATS, make, scrape, value

from serving.engine.metrics.metrics import EngineMetrics
from serving.engine.metrics.stats import EngineStats


def test_gauges_are_read_when_scraped():
    families = scrape(make())
    assert value(families, "vllm:num_requests_running") == 3
    assert value(families, "vllm:num_requests_waiting") == 5
    by_reason = "vllm:num_requests_waiting_by_reason"
    assert value(families, by_reason, reason="capacity") == 3
    assert value(families, by_reason, reason="deferred") == 2
    assert value(families, "vllm:kv_cache_usage_perc") == 0.25
    assert value(families, "vllm:prefix_cache_hits", "vllm:prefix_cache_hits_total") == 4
    assert value(families, "vllm:cache_config_info", block_size="16", num_gpu_blocks="99") == 1
    assert value(families, "lora_jax:adapter_slots_used") == 2
    assert value(families, "lora_jax:adapter_bytes", kind="lora") == 123
    assert value(families, "lora_jax:adapter_swaps", "lora_jax:adapter_swaps_total") == 6


def test_gateways_see_one_lora_series_whatever_changes():
    current = [EngineStats()]
    cache = {"block_size": "16", "num_gpu_blocks": "99"}
    made = EngineMetrics("tiny", 128, cache, 4, lambda: current[0])
    for stats in (EngineStats(), STATS, dataclasses.replace(STATS, resident_adapters=("x",))):
        current[0] = stats
        (sample,) = scrape(made)["vllm:lora_requests_info"].samples
        assert sample.labels == {
            "max_lora": "4",
            "waiting_lora_adapters": ",".join(stats.waiting_adapters),
            "running_lora_adapters": ",".join(stats.resident_adapters),
        }
        assert sample.value > 1.7e9
