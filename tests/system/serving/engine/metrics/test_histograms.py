"""Histograms: the buckets of dashboards, and what is known of a request."""

import dataclasses

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from support.cases.metrics_cases import DONE, make, scrape, value

from serving.engine.metrics.histograms import ITL, BulkHistogram, length_buckets


@pytest.mark.parametrize("value", [0.0, 0.01, 0.010001, 0.5, 1000.0])
def test_equal_values_count_together_as_one_by_one(value):
    texts = []
    for kind in (Histogram, BulkHistogram):
        registry = CollectorRegistry()
        series = kind("x", "x", ["a"], buckets=ITL, registry=registry).labels(a="1")
        if isinstance(series, BulkHistogram):
            series.observe_equal(value, 4)
        else:
            for _ in range(4):
                series.observe(value)
        lines = generate_latest(registry).decode().splitlines()
        texts.append([line for line in lines if "_created" not in line])
    assert texts[0] == texts[1]


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


def test_dashboards_find_their_boundaries():
    families = scrape(make())
    samples = families["vllm:time_to_first_token_seconds"].samples
    edges = [s.labels["le"] for s in samples if "le" in s.labels]
    assert edges[:3] == ["0.001", "0.005", "0.01"]
    assert edges[-2:] == ["2560.0", "+Inf"]
    assert length_buckets(128) == (1, 2, 5, 10, 20, 50, 100)
    assert length_buckets(1) == (1,)


def test_a_task_head_s_answer_has_a_time_as_a_first_token_has():
    """A guard's `ttft_s` would never act on versions with a head, which give no token."""
    by_head = dataclasses.replace(
        DONE, reasons=("stop",), output_lengths=(0,), first_token_s=None, by_head=True, tier="disk"
    )
    assert by_head.outcome().ttft_s == by_head.ttft_s == 11.0
    assert dataclasses.replace(DONE, by_head=True).ttft_s == 3.0, "answered by the LM head"
    for reason in ("abort", "error"):
        assert dataclasses.replace(by_head, reasons=(reason,)).ttft_s is None
    made = make()
    made.add_adapter("sql@v1")
    made.request_done(dataclasses.replace(by_head, adapter="sql@v1"))
    families = scrape(made)
    for name, labels in (("tier", {"tier": "disk"}), ("version", {"version": "v1"})):
        family = f"lora_jax:adapter_{name}_ttft_seconds"
        assert value(families, family, f"{family}_count", **labels) == 1
        assert value(families, family, f"{family}_sum", **labels) == 11.0
