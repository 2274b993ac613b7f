"""Scraped metrics: vLLM's names, one series for gateways, bounded labels."""

import dataclasses

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serving.engine import metrics
from serving.engine.metrics import EngineMetrics, EngineStats, FinishedRequest

STATS = EngineStats(
    running=3,
    waiting=5,
    waiting_for_adapter=2,
    kv_usage=0.25,
    prefix_queries=10,
    prefix_hits=4,
    preemptions=1,
    adapter_slots_used=2,
    adapter_slots_total=4,
    adapter_swaps=6,
    adapter_bytes={"lora": 123},
    resident_adapters=("law", "sql"),
    waiting_adapters=("med",),
)
DONE = FinishedRequest(
    adapter="sql",
    reasons=("stop", "length"),
    num_prompt=7,
    num_cached=4,
    output_lengths=(3, 5),
    max_tokens=5,
    arrival_s=10.0,
    scheduled_s=11.0,
    first_token_s=13.0,
    finished_s=21.0,
    preemptions=0,
)
GAUGES = """num_requests_running num_requests_waiting num_requests_waiting_by_reason
kv_cache_usage_perc engine_sleep_state cache_config_info lora_requests_info"""
COUNTERS = """prompt_tokens generation_tokens prompt_tokens_cached prompt_tokens_by_source
prefix_cache_queries prefix_cache_hits mm_cache_queries mm_cache_hits num_preemptions
request_success admission_rejections"""
HISTOGRAMS = """time_to_first_token_seconds inter_token_latency_seconds
request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
iteration_tokens_total request_prompt_tokens request_generation_tokens
request_max_num_generation_tokens request_params_n request_params_max_tokens
request_prefill_kv_computed_tokens request_num_preemptions"""


def make(stats=STATS):
    cache = {"block_size": "16", "num_gpu_blocks": "99"}
    return EngineMetrics("tiny", 128, cache, 4, lambda: stats)


def scrape(made):
    text = generate_latest(made.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families, name, sample=None, **labels):
    found = [
        s.value
        for s in families[name].samples
        if s.name == (sample or name) and labels.items() <= s.labels.items()
    ]
    assert len(found) == 1, (name, found)
    return found[0]


def test_every_vllm_name_is_there_from_the_start_with_its_type_and_labels():
    families = scrape(make(EngineStats()))
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names.split():
            family = families[f"vllm:{name}"]
            assert family.type == kind, name
            assert family.samples, name
            for sample in family.samples:
                if name not in ("lora_requests_info", "admission_rejections"):
                    assert sample.labels["model_name"] == "tiny"
                    assert sample.labels["engine"] == "0"


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


def test_a_finished_request_feeds_counters_and_histograms():
    made = make()
    made.set_adapters(["sql"])
    made.request_done(DONE)
    made.prompt_scheduled(3, 4)
    made.tokens_generated(8)
    families = scrape(made)
    success = "vllm:request_success"
    assert value(families, success, f"{success}_total", finished_reason="stop") == 1
    assert value(families, success, f"{success}_total", finished_reason="length") == 1
    assert value(families, "vllm:prompt_tokens", "vllm:prompt_tokens_total") == 7
    assert value(families, "vllm:prompt_tokens_cached", "vllm:prompt_tokens_cached_total") == 4
    for name, want in {
        "e2e_request_latency_seconds": 11.0,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 8.0,
        "request_inference_time_seconds": 10.0,
        "request_time_per_output_token_seconds": 2.0,
        "request_generation_tokens": 8,
        "request_max_num_generation_tokens": 5,
        "request_prefill_kv_computed_tokens": 3,
        "request_params_n": 2,
    }.items():
        assert value(families, f"vllm:{name}", f"vllm:{name}_sum") == want, name
    by_adapter = "lora_jax:adapter_generation_tokens"
    assert value(families, by_adapter, f"{by_adapter}_total", adapter="sql") == 8


def test_only_loaded_names_become_labels():
    made = make()
    for number in range(50):
        made.set_adapters([f"adapter-{number}"])
        made.request_done(dataclasses.replace(DONE, adapter=f"adapter-{number}"))
        made.request_done(dataclasses.replace(DONE, adapter=f"gone-{number}"))
    made.request_done(dataclasses.replace(DONE, adapter=None))
    family = scrape(made)["lora_jax:adapter_requests"]
    counts = {s.labels["adapter"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert counts == {"adapter-49": 1, "other": 50, "tiny": 1}


def test_a_request_that_never_ran_leaves_unknown_times_out():
    made = make()
    made.request_done(
        dataclasses.replace(DONE, scheduled_s=None, first_token_s=None, output_lengths=(0, 0))
    )
    families = scrape(made)
    assert (
        value(
            families, "vllm:e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds_count"
        )
        == 1
    )
    for name in ("request_queue_time_seconds", "request_decode_time_seconds"):
        assert value(families, f"vllm:{name}", f"vllm:{name}_count") == 0


def test_rejections_have_known_reasons():
    made = make()
    for reason in metrics.REJECTIONS:
        made.rejected(reason)
    name = "vllm:admission_rejections"
    families = scrape(made)
    assert value(families, name, f"{name}_total", reason="queue_full", model_name="tiny") == 1


def test_dashboards_find_their_boundaries():
    families = scrape(make())
    samples = families["vllm:time_to_first_token_seconds"].samples
    edges = [s.labels["le"] for s in samples if "le" in s.labels]
    assert edges[:3] == ["0.001", "0.005", "0.01"]
    assert edges[-2:] == ["2560.0", "+Inf"]
    assert metrics.length_buckets(128) == (1, 2, 5, 10, 20, 50, 100)
    assert metrics.length_buckets(1) == (1,)


@pytest.mark.parametrize("queries", [0, 8])
def test_hit_rate(queries):
    stats = EngineStats(prefix_queries=queries, prefix_hits=queries // 4)
    assert stats.prefix_hit_rate == (0.25 if queries else 0.0)
