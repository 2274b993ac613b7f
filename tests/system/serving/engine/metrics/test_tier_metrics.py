"""Counts by tier, in a registry and in an engine whose host holds fewer adapters than it knows."""

from prometheus_client import CollectorRegistry
from support.cases import tiny_checkpoint
from support.cases.engine_cases import SCORED, SHAPES, answer, prompts_of, settle

from serving import Engine
from serving.engine.metrics.tier_metrics import TierMetrics


def test_every_tier_has_series_from_the_start():
    registry = CollectorRegistry()
    made, sample = TierMetrics(registry), registry.get_sample_value
    tiers = ("device", "host", "disk")
    assert [sample("lora_jax:adapter_tier_hits_total", {"tier": t}) for t in tiers] == [0, 0, 0]
    made.queued("disk")
    made.ended("disk", 0.2)
    made.ended("disk", None)
    made.ended("", 0.2)
    made.read(0.01)
    assert sample("lora_jax:adapter_tier_hits_total", {"tier": "disk"}) == 1
    assert sample("lora_jax:adapter_tier_ttft_seconds_count", {"tier": "disk"}) == 1
    assert sample("lora_jax:adapter_read_seconds_count") == 1


def test_more_adapters_than_the_host_holds_are_served(tmp_path):
    """12 adapters, 4 on the host, 2 on the device: every answer is that of an engine with room.

    All at once as one by one: requests for more adapters than the host holds wait for room.
    """
    shape = SHAPES["llama"]
    tiny_checkpoint.write_model(tmp_path / "model", shape)
    paths = {f"a{n}": tmp_path / f"a{n}" for n in range(12)}
    for n, path in enumerate(paths.values()):
        tiny_checkpoint.write_adapter(path, shape, 2, seed=n)
    sizes = {
        "structured_outputs": False,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
    }
    sizes |= {"max_lora_rank": 2, "block_size": 4}
    names = [f"a{(7 * n) % 12}" for n in range(24)]
    prompts = prompts_of(24, seed=31)
    with Engine(tmp_path / "model", paths, max_loras=2, **sizes) as roomy:
        want = [answer(output) for output in roomy.generate(prompts, names, SCORED)]
    with Engine(tmp_path / "model", paths, max_loras=2, max_cpu_loras=4, **sizes) as engine:
        assert len(engine.registry.entries()) == 4
        assert len(engine.adapters()) == 12
        found = [
            answer(engine.generate([prompt], name, SCORED)[0])
            for prompt, name in zip(prompts, names, strict=True)
        ]
        assert found == want
        assert [answer(one) for one in engine.generate(prompts, names, SCORED)] == want
        for _ in range(3):
            engine.generate(prompts[:1], names[-1], SCORED)
        settle(engine)
        assert len(engine.registry.entries()) == 4
        sample = engine.metrics.registry.get_sample_value
        hits = {
            tier: sample("lora_jax:adapter_tier_hits_total", {"tier": tier})
            for tier in ("device", "host", "disk")
        }
        assert sum(hits.values()) == 27 + 24
        assert hits["disk"] >= 8
        assert hits["device"] >= 2  # of three alike, the first may find its adapter gone
        assert sample("lora_jax:adapter_read_seconds_count") >= 12 + hits["disk"]
        firsts = sample("lora_jax:adapter_tier_ttft_seconds_count", {"tier": "disk"})
        assert firsts == hits["disk"]
        # A version with a share stays, and so does the one that was last taken to 0.
        for version in ("v1", "v2"):
            tiny_checkpoint.write_adapter(tmp_path / version, shape, 2, seed=50 + (version == "v2"))
            engine.load_adapter(f"sql@{version}", tmp_path / version)
        engine.rollout("sql", v1=100)
        engine.rollout("sql", v2=100)
        for name in names[:6]:
            engine.generate(prompts[:1], name, SCORED)
        assert {"sql@v1", "sql@v2"} < {entry.name for entry in engine.registry.entries()}
