"""The measurement of a whole server: its points, its limits, its plot."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.decode_step import QWEN3
from bench.end_to_end.limits import Card, Limits
from bench.end_to_end.plots import peers_of, plot_end_to_end, rates
from bench.end_to_end.points import Point, Target, by_popularity, plan, seed_of
from bench.end_to_end.server import write_adapter_configs

NAMES = tuple(f"a{i}" for i in range(64))


def test_the_plan_has_each_case_at_each_concurrency():
    found = Counter(point.case for point in plan([1, 64], NAMES))
    assert found == {"base": 2, "8 adapters": 2, "64 adapters": 2, "prompts": 1}
    assert {point.case for point in plan([1], ())} == {"base", "prompts"}


def test_no_two_points_share_their_prompts():
    points = plan([1, 16, 64, 256], NAMES)
    seeds = [seed_of(point, repeat) for point in points for repeat in range(3)]
    assert len(set(seeds)) == len(seeds)


def test_names_stand_as_often_as_zipfs_law_says():
    counts = Counter(by_popularity(NAMES, 1.2))
    assert set(counts) == set(NAMES)
    assert counts["a0"] / counts["a1"] == pytest.approx(2**1.2, rel=0.02)
    assert counts["a0"] / counts["a7"] == pytest.approx(8**1.2, rel=0.05)


def test_limits_are_those_counted_by_hand():
    config = {"hidden_size": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    config |= {"intermediate_size": 8, "num_hidden_layers": 3, "vocab_size": 10}
    limits = Limits(config, Card(bytes_per_s=1.0, flops_per_s=1.0))
    # q, o: 4x4 each; k, v: 4x2 each; three maps of 4x8; keys and values of 2 rows of 5 tokens
    assert limits.step_s(2, 5) == 2 * (3 * (16 * 2 + 8 * 2 + 96 + 2 * 2 * 5 * 2) + 40)
    assert limits.prompt_token_s(6) == 2 * 3 * (144 + 2 * 2 * 2 * 3)
    prompts = Point("prompts", 2, 4, prompt=6, answer=1)
    assert limits.tokens_per_s(prompts) == pytest.approx(1 / limits.prompt_token_s(6))


def test_rows_of_a_few_experts_read_less():
    config = {**QWEN3, "num_hidden_layers": 48, "intermediate_size": 6144}
    limits = Limits(config, Card(4.1e12, 790e12))
    assert limits.step_s(1, 576) < 0.2 * limits.step_s(64, 576)
    assert limits.step_s(64, 576) == pytest.approx(15.4e-3, rel=0.02)


def test_requests_that_fail_are_an_error_with_what_the_generator_said(tmp_path):
    client, raw = tmp_path / "client", tmp_path / "raw.json"
    answers = json.dumps({"completed": 2})
    client.write_text(f"#!/bin/sh\necho '{answers}' > {raw}\necho 'Error: 503, no room'\n")
    client.chmod(0o700)
    target = Target("http://127.0.0.1:9", "base", tmp_path, client)
    with pytest.raises(RuntimeError, match=r"2 of 3 requests .* said: Error: 503, no room$"):
        target.measure(Point("base", 1, 3), 0, raw)


def test_adapters_differ_in_their_configs(tmp_path):
    modules = write_adapter_configs(tmp_path, 3, 16)
    texts = [
        Path(module.partition("=")[2], "adapter_config.json").read_text() for module in modules
    ]
    assert len(set(texts)) == 3


def test_the_plot_has_the_peer_of_the_same_model_and_card(tmp_path):
    row = {"case": "base", "concurrency": 1, "repeat": 0, "output_throughput": 5.0}
    own = {"server": "lora-jax", "model": "m", "device": "d", "date": "2026-01-01"}
    failed = {**row, "repeat": 2, "error": "refused"}
    own["rows"] = [row, {**row, "repeat": 1, "output_throughput": 7.0}, failed]
    for name, changed in {"peer": {"server": "peer"}, "other": {"model": "n"}}.items():
        (tmp_path / f"end_to_end_{name}.json").write_text(json.dumps({**own, **changed}))
    assert [peer["server"] for peer in peers_of(own, tmp_path)] == ["peer"]
    assert rates(own, "base") == {1: 6.0}
    plot_end_to_end(own, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    plot_end_to_end({**own, "rows": [failed]}, tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()
