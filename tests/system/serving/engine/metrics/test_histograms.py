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
