"""Figures of an engine and of a request for the tests of metrics, and a scrape to read."""

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serving.engine.metrics.histograms import FinishedRequest
from serving.engine.metrics.metrics import EngineMetrics
from serving.engine.metrics.stats import EngineStats

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
