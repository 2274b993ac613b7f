"""Histograms: the buckets of dashboards, and what is known of a request."""

import dataclasses

from support.cases.metrics_cases import DONE, make, scrape, value

from serving.engine.metrics.histograms import length_buckets


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
