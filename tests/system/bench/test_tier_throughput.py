import json
from types import SimpleNamespace

from bench import tier_throughput as bench


def test_adapters_of_shared_files_have_digests_of_their_own(tmp_path):
    names = bench.write_adapters(tmp_path, bench.SMALL, bench.DISTINCT + 2)
    first, again = (tmp_path / names[n] for n in (0, bench.DISTINCT))
    inodes = {(folder / "adapter_model.safetensors").stat().st_ino for folder in (first, again)}
    configs = {(folder / "adapter_config.json").read_text() for folder in (first, again)}
    assert len(inodes) == 1
    assert len(configs) == 2
    assert json.loads(configs.pop())["target_modules"] == ["q_proj", "v_proj"]


def test_a_tenth_of_the_requests_asks_the_base_model():
    asked = bench.asked_by(["a0", "a1"], 2000, bench.Case(), bench.random.Random(0))
    assert 120 < asked.count(None) < 280
    assert asked.count("a0") > 1.5 * asked.count("a1")


def test_one_adapter_is_asked_as_often_as_many(monkeypatch):
    """Rates of different counts of requests do not compare: the last ones leave rows idle."""
    figures = {"tokens_per_s": 1.0, "base_tpot_ms": 1.0}
    monkeypatch.setattr(bench, "run_round", lambda *args: dict(figures))
    monkeypatch.setattr(bench, "tier_hits", lambda engine: {})
    engine = SimpleNamespace(stats=lambda: SimpleNamespace(steps=0))
    case, rng = bench.Case(), bench.random.Random(0)
    for names in (["a0"], ["a0", "a1"]):
        found = bench.measure_population(engine, names, case, rng)
        asked = [one["requests"] for one in found["rounds"]]
        assert asked == [case.fill] + [case.requests] * case.rounds
