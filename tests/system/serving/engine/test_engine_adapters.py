"""Adapters that come, change and go while requests run, and adapters that are bad."""

import dataclasses
import time

import numpy as np
import pytest
from support.cases import tiny_checkpoint
from support.cases.engine_cases import (
    GREEDY,
    RANKS,
    SCORED,
    SHAPES,
    Listener,
    answer,
    prompts_of,
    settle,
)
from support.waiting import wait_until

from lora_jax.adapters.registry import AdapterExists
from serving import FinishReason, RequestFailed, Sampling

# Answers are compared bit for bit, so the compiler's code counts.
pytestmark = pytest.mark.as_shipped


def test_a_reload_changes_the_answer_at_once_and_old_requests_finish_on_the_old(engine, folder):
    shape, prompt = SHAPES["llama"], prompts_of(1, seed=6, low=30, high=31)[0]
    for version in (1, 2):
        path = folder / f"version-{version}"
        tiny_checkpoint.write_adapter(path, shape, 4, seed=100 + version, strength=2.0)
    paths = [str(folder / f"version-{version}") for version in (1, 2)]
    first_info = engine.load_adapter("mine", paths[0])
    long = dataclasses.replace(SCORED, max_tokens=60)
    want = answer(engine.generate([prompt], "mine", long)[0])
    with pytest.raises(AdapterExists, match="mine"):
        engine.load_adapter("mine", paths[1])
    running = Listener()
    engine.submit(prompt, "mine", long, on_output=running)
    while not running.deltas:
        time.sleep(0.001)
    second_info = engine.load_adapter("mine", paths[1], replace=True)
    assert second_info.digest != first_info.digest
    renewed = engine.generate([prompt], "mine", long)[0]
    assert renewed.num_cached_tokens == 0
    assert answer(renewed) != want
    assert running.wait().finish_reason is FinishReason.LENGTH
    assert running.tokens() == want[0]
    engine.load_adapter("mine", paths[0], replace=True)
    assert answer(engine.generate([prompt], "mine", long)[0]) == want
    engine.unload_adapter("mine")


def test_an_unloaded_adapter_is_gone_at_once_while_its_requests_finish(engine, folder):
    path = str(folder / "a4")
    engine.load_adapter("brief", path, pinned=True)
    (info,) = [info for info in engine.adapters() if info.name == "brief"]
    assert (info.kind, info.rank, info.pinned) == ("lora", RANKS[4], True)
    assert info.bytes > 0
    assert info.report.num_tensors == 2 * 7 * SHAPES["llama"].layers
    running = Listener()
    long = dataclasses.replace(GREEDY, max_tokens=50)
    engine.submit([5, 6, 7], "brief", long, on_output=running)
    engine.unload_adapter("brief")
    with pytest.raises(KeyError, match=r"'brief' does not exist\. Known: a0, a1"):
        engine.generate(["x"], "brief")
    assert running.wait().finish_reason is FinishReason.LENGTH
    assert running.tokens() == engine.generate([[5, 6, 7]], "a4", long)[0].outputs[0].token_ids


@pytest.mark.long
def test_500_requests_over_64_adapters_on_16_slots(engine, folder):
    shape, rng = SHAPES["llama"], np.random.default_rng(7)
    for place in range(64):
        path = folder / "more" / f"zipf-{place}"
        tiny_checkpoint.write_adapter(path, shape, int(rng.integers(1, 9)), seed=200 + place)
    chances = np.arange(1, 65) ** -1.2
    names = [f"zipf-{i}" for i in rng.choice(64, 500, p=chances / chances.sum())]
    prompts = prompts_of(500, seed=8, high=12)
    samplings = [
        Sampling(
            max_tokens=int(rng.integers(1, 8)),
            temperature=float(rng.choice([0.0, 1.0])),
            seed=place,
            top_p=float(rng.choice([1.0, 0.8])),
            logprobs=[None, 0, 5][place % 3],
            presence_penalty=float(rng.choice([0.0, 0.5])),
            ignore_eos=True,
        )
        for place in range(500)
    ]
    before = engine.stats()
    outputs = engine.generate(prompts, names, samplings)  # read from lora_dir on first use
    after = engine.stats()
    assert [len(o.outputs[0].token_ids) for o in outputs] == [s.max_tokens for s in samplings]
    assert after.compilations_after_warmup == 0
    assert after.adapter_swaps - before.adapter_swaps > 32
    assert after.adapter_slots_used == after.adapter_slots_total == 16
    for place in (0, 250, 499):
        alone = engine.generate([prompts[place]], names[place], samplings[place])[0]
        assert answer(alone) == answer(outputs[place])


def test_logits_that_overflow_fail_their_own_request(engine, folder):
    shape = SHAPES["llama"]
    tiny_checkpoint.write_adapter(folder / "wild", shape, 2, seed=1, strength=1e30)
    engine.load_adapter("wild", str(folder / "wild"))
    prompt = prompts_of(1, seed=14)[0]
    want = answer(engine.generate([prompt], "a2", SCORED)[0])
    wild, tame = Listener(), Listener()
    engine.submit(prompt, "wild", SCORED, on_output=wild)
    engine.submit(prompt, "a2", SCORED, on_output=tame)
    assert wild.wait().finish_reason is FinishReason.ERROR
    assert "not finite" in wild.deltas[-1].error
    assert not wild.deltas[-1].retryable
    assert tame.wait().finish_reason is FinishReason.LENGTH
    assert tame.tokens() == want[0]
    with pytest.raises(RequestFailed, match="not finite"):
        engine.generate([prompt], "wild", SCORED)
    engine.unload_adapter("wild")


def test_a_bad_version_rolls_itself_back_and_others_do_not_notice(engine, folder):
    tiny_checkpoint.write_adapter(folder / "broken", SHAPES["llama"], 2, seed=1, strength=1e30)
    engine.load_adapter("sql@v1", str(folder / "a1"))
    engine.load_adapter("sql@v2", str(folder / "broken"))
    prompt = prompts_of(1, seed=15)[0]
    want = answer(engine.generate([prompt], "a1", SCORED)[0])
    state = engine.rollout("sql", v1=50, v2=50, guard={"error_rate": 0.1, "min_requests": 20})
    assert state.now.buckets == {"v1": 5000, "v2": 5000}
    users = [f"user-{n}" for n in range(40)]
    on_new = [user for user in users if engine.rollouts.pick("sql", user) == "sql@v2"]
    assert 5 < len(on_new) < 35
    failed = []
    for user in users:
        try:
            output = engine.generate([prompt], "sql", SCORED, session=user)[0]
        except RequestFailed:
            failed.append(user)
        else:
            assert output.adapter_version == "v1"
            assert answer(output) == want
    assert len(failed) >= 3  # of 20 at most 2 may fail
    assert set(failed) < set(on_new)
    wait_until(lambda: engine.rollouts.state("sql").now.buckets["v2"] == 0)
    outputs = [engine.generate([prompt], "sql", SCORED, session=user)[0] for user in on_new]
    assert {output.adapter_version for output in outputs} == {"v1"}
    sample = engine.metrics.registry.get_sample_value
    labels = {"adapter": "sql", "version": "v2"}
    name = "lora_jax:adapter_version_requests_total"
    assert sample(name, labels | {"finished_reason": "error"}) == len(failed)
    assert sample("lora_jax:rollout_share", labels) == 0
    assert sample("lora_jax:rollout_share", labels | {"version": "v1"}) == 100
    assert list(engine.stream(prompt, "sql", GREEDY, session="x"))
    with pytest.raises(ValueError, match="no earlier version"):
        engine.rollback("sql")
    with pytest.raises(ValueError, match="'sql@v1' has 100%"):
        engine.unload_adapter("sql@v1")
    engine.rollouts.end("sql")
    for version in ("v1", "v2"):
        engine.unload_adapter(f"sql@{version}")
    settle(engine)
