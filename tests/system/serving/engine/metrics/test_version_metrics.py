"""Series by version: of versions that are loaded, and of no others."""

from prometheus_client import CollectorRegistry, generate_latest

from serving.adapters.rollout import rolled_out
from serving.engine.metrics.version_metrics import ShareCollector, VersionMetrics


def test_only_loaded_versions_have_series():
    registry = CollectorRegistry()
    made = VersionMetrics(registry)
    for name in ("sql", "sql@v1", "sql@v2", "sql@v1"):
        made.add(name)
    made.ended("sql@v1", ("stop", "length"), 0.5, -6.0, 3)
    made.ended("sql@v1", ("error",), None, 0.0, 0)
    made.ended("sql@v9", ("stop",), 0.5, 0.0, 0)
    made.ended("sql", ("stop",), 0.5, 0.0, 0)
    sample, labels = registry.get_sample_value, {"adapter": "sql", "version": "v1"}
    name = "lora_jax:adapter_version_requests_total"
    ended = {r: sample(name, labels | {"finished_reason": r}) for r in ("stop", "length", "error")}
    assert ended == {"stop": 1, "length": 1, "error": 1}
    assert sample("lora_jax:adapter_version_ttft_seconds_sum", labels) == 0.5
    assert sample("lora_jax:adapter_version_ttft_seconds_count", labels) == 1
    assert sample("lora_jax:adapter_version_scored_tokens_total", labels) == 3
    assert sample("lora_jax:adapter_version_negative_logprob_total", labels) == 6
    for name in ("sql", "sql@v1", "sql@v9"):
        made.remove(name)
    text = generate_latest(registry).decode()
    assert 'version="v2"' in text
    assert 'version="v1"' not in text
    assert 'version="v9"' not in text


def test_shares_are_those_of_now():
    registry, states = CollectorRegistry(), {}
    registry.register(ShareCollector(lambda: states))
    assert registry.get_sample_value("lora_jax:rollout_share") is None
    states["sql"] = rolled_out(None, {"v1": 95, "v2": 5}, known=("v1", "v2"))
    labels = {"adapter": "sql", "version": "v2"}
    assert registry.get_sample_value("lora_jax:rollout_share", labels) == 5
