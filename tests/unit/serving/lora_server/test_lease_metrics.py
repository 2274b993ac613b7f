"""A LoRA Server's counters: a lease counts once, by its slowest part, on the right tier."""

import re

from serving.lora_server.lease_metrics import TIERS, LeaseMetrics, PartLoad


def values(metrics: LeaseMetrics) -> dict[str, float]:
    """Return the samples of the exposition text that are neither buckets nor times of creation."""
    samples = re.findall(r"^(lora_jax:\S+) (\S+)$", metrics.text(), re.MULTILINE)
    left = {name: float(value) for name, value in samples if "_bucket" not in name}
    return {name: value for name, value in left.items() if "_created" not in name}


def hits(metrics: LeaseMetrics) -> list[float]:
    named = values(metrics)
    return [named[f'lora_jax:lora_server_tier_hits_total{{tier="{tier}"}}'] for tier in TIERS]


def test_every_tier_has_a_series_before_the_first_lease():
    assert hits(LeaseMetrics()) == [0, 0, 0]


def test_a_lease_counts_where_its_adapter_was():
    metrics = LeaseMetrics()
    metrics.held()
    metrics.loaded([PartLoad(0.0, 0.2), PartLoad(0.0, 0.1)])
    assert hits(metrics) == [1, 1, 0]
    metrics.loaded([PartLoad(0.0, 0.2), PartLoad(0.5, 0.7)])  # one rank had to read
    assert hits(metrics) == [1, 1, 1]


def test_the_slowest_part_is_what_a_load_took():
    metrics = LeaseMetrics()
    metrics.loaded([PartLoad(0.25, 0.5), PartLoad(0.5, 2.0)])
    metrics.loaded([PartLoad(0.0, 0.125)])  # from host memory: nothing was read
    named = values(metrics)
    assert named["lora_jax:lora_server_read_seconds_sum"] == 0.5
    assert named["lora_jax:lora_server_read_seconds_count"] == 1
    assert named["lora_jax:lora_server_load_seconds_sum"] == 2.125
    metrics.loaded([])  # no rank took part
    assert values(metrics)["lora_jax:lora_server_load_seconds_count"] == 3
