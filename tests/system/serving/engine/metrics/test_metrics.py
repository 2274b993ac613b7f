"""Scraped metrics: vLLM's names, one series for gateways, bounded labels."""

import dataclasses
import threading

from prometheus_client import generate_latest
from support.cases.metrics_cases import DONE, make, scrape, value

from serving.engine.metrics import metrics
from serving.engine.metrics.stats import EngineStats

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


def test_a_finished_request_feeds_counters_and_histograms():
    made = make()
    made.add_adapter("sql")
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


def test_requests_can_be_forgotten_and_loads_stay_counted():
    made = make(EngineStats())
    for name in ("sql", "law@2"):  # a version has series of its own
        made.add_adapter(name)
    made.adapter_loaded_on_device(0.5)
    made.tiers.read(0.1)

    def lines():
        text, times = generate_latest(made.registry).decode(), ("_created", "requests_info")
        return sorted(line for line in text.splitlines() if not any(t in line for t in times))

    before = lines()
    made.request_done(DONE)
    made.request_done(dataclasses.replace(DONE, adapter="law@2"))
    made.prompt_scheduled(3, 4)
    made.tokens_generated(8)
    made.step_done(5)
    made.tiers.queued("host")
    made.rejected("invalid")
    assert lines() != before
    assert made.requests_done == 2
    made.forget_requests()
    assert lines() == before
    assert (made.requests_done, made.prompt_tokens, made.generation_tokens) == (0, 0, 0)
    made.request_done(DONE)  # and counted from then on
    by_adapter = "lora_jax:adapter_requests"
    assert value(scrape(made), by_adapter, f"{by_adapter}_total", adapter="sql") == 1


def test_an_adapter_that_comes_while_requests_are_forgotten_has_its_series(monkeypatch):
    made = make()
    begin, coming = made._begin, threading.Thread(target=made.add_adapter, args=("new",))

    def begin_late():
        coming.start()
        coming.join(0.1)
        begin()

    monkeypatch.setattr(made, "_begin", begin_late)
    made.forget_requests()
    coming.join(60)
    made.request_done(dataclasses.replace(DONE, adapter="new"))
    by_adapter = "lora_jax:adapter_requests"
    assert value(scrape(made), by_adapter, f"{by_adapter}_total", adapter="new") == 1


def test_only_loaded_names_become_labels():
    made = make()
    for number in range(50):
        made.add_adapter(f"adapter-{number}")
        made.remove_adapter(f"adapter-{number - 1}")
        made.request_done(dataclasses.replace(DONE, adapter=f"adapter-{number}"))
        made.request_done(dataclasses.replace(DONE, adapter=f"gone-{number}"))
    made.request_done(dataclasses.replace(DONE, adapter=None))
    family = scrape(made)["lora_jax:adapter_requests"]
    counts = {s.labels["adapter"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert counts == {"adapter-49": 1, "other": 50, "tiny": 1}


def test_weighted_sums_count_once_and_for_each_of_their_adapters():
    """So that requests and tokens by adapter still sum to all of them."""
    made = make()
    for name in ("law", "sql@v2"):
        made.add_adapter(name)
    for name in ("law*0.7+sql@v2*1", "law*0.5+gone*1", "law*-2", "law", None):
        made.request_done(dataclasses.replace(DONE, adapter=name))
    families = scrape(made)

    def counts(name):
        samples = families[f"lora_jax:adapter_{name}"].samples
        return {s.labels["adapter"]: s.value for s in samples if s.name.endswith("_total")}

    assert counts("requests") == {"composed": 3, "law": 1, "sql@v2": 0, "tiny": 1}
    assert counts("generation_tokens") == {"composed": 24, "law": 8, "sql@v2": 0, "tiny": 8}
    assert counts("composed_requests") == {"law": 3, "sql@v2": 1}
    made.remove_adapter("law")
    assert "law" not in made_labels(made)
    made.request_done(dataclasses.replace(DONE, adapter="law*0.7+sql@v2*1"))
    assert "law" not in made_labels(made)


def made_labels(made):
    families = scrape(made)
    return {s.labels.get("adapter") for family in families.values() for s in family.samples}


def test_rejections_have_known_reasons():
    made = make()
    for reason in metrics.REJECTIONS:
        made.rejected(reason)
    name = "vllm:admission_rejections"
    families = scrape(made)
    assert value(families, name, f"{name}_total", reason="queue_full", model_name="tiny") == 1


def test_what_is_noted_is_counted_by_the_next_scrape_in_its_order():
    made, order = make(), []
    made.later(order.append, 1)
    made.later(order.append, 2)
    assert (made.has_notes, order) == (True, [])
    scrape(made)
    assert (made.has_notes, order) == (False, [1, 2])


def test_the_last_requests_of_an_adapter_count_as_its_own_though_it_goes_before_they_count():
    made = make()
    made.add_adapter("law@2")
    made.later(made.request_done, dataclasses.replace(DONE, adapter="law@2"))
    seen = []
    made.later(lambda: seen.append(set(made._adapters)))
    made.remove_adapter("law@2")
    assert seen == [{"tiny", "law@2"}]
    family = scrape(made)["lora_jax:adapter_requests"]
    assert "other" not in {s.labels["adapter"] for s in family.samples}
