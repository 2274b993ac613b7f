"""Merged weights in an engine: plain bits, the merged checkpoint's bits, and mixtures near both."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cases import tiny_checkpoint
from support.cases.engine_cases import PAGE_BYTES, SCORED, SHAPES, answer, prompts_of, settle

from serving import Engine
from serving.api.config import EngineConfig
from serving.engine.parts.merging import merge_primary
from serving.scheduling.merge_policy import PLAIN, MergeTarget

SHAPE = SHAPES["llama"]
NAMES = ["a0", "a1", None, "a0", "a2", "a0", None, "a1"]
PROMPTS = prompts_of(len(NAMES), seed=3)


def start(folder, lora_merge, model="model", adapters=("a0", "a1", "a2"), **fields) -> Engine:
    return Engine(
        str(folder / model),
        adapters={name: str(folder / name) for name in adapters},
        dtype="float32",
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        block_size=4,
        kv_cache_memory_bytes=60 * PAGE_BYTES["float32"],
        max_loras=4,
        max_lora_rank=8,
        lora_merge=lora_merge,
        **({"structured_outputs": False} | fields),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("merging")
    tiny_checkpoint.write_model(folder / "model", SHAPE)
    for place in range(4):
        tiny_checkpoint.write_adapter(folder / f"a{place}", SHAPE, place + 3, place, strength=0.1)
    return folder


@pytest.fixture(scope="module")
def engine(folder):
    with start(folder, "auto") as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(folder):
    """Answers of an engine that merges nothing."""
    with start(folder, "off") as engine:
        assert engine._loop._parts.runner.merged is None
        return answers(engine)


class Fixed:
    """A policy that says what it is told."""

    def __init__(self, digest: str):
        self.digest = digest

    def next(self, target, rows, can_merge):
        return MergeTarget(self.digest)


class Restless:
    """A policy that chooses anew in every step."""

    def __init__(self, digests, seed=0):
        self.digests, self.rng = digests, random.Random(seed)

    def next(self, target, rows, can_merge):
        return MergeTarget(self.rng.choice(self.digests))


def answers(engine, names=NAMES):
    return [answer(output) for output in engine.generate(PROMPTS, names, SCORED)]


def digest_of(engine, name):
    return PLAIN if name is None else engine.registry.get(name).digest


def obey(engine, policy):
    """Have sequences that begin from now on follow a policy: one step is what it takes."""
    engine._loop._parts.scheduler.modes.policy = policy
    engine.generate(PROMPTS[:1], None, SCORED)
    settle(engine)


def merge(engine, name):
    obey(engine, Fixed(digest_of(engine, name)))


def steps(engine):
    return dict(engine._loop._parts.runner.merged.steps)


def logprobs(one):
    return np.array([token.logprob for token in one[2]])


def near(got, want):
    assert got[0] == want[0]
    np.testing.assert_allclose(logprobs(got), logprobs(want), rtol=0, atol=1e-4)


def test_plain_steps_have_the_bits_of_an_engine_that_never_merges(engine, plain):
    merge(engine, None)
    assert answers(engine) == plain
    merge(engine, "a1")
    answers(engine)
    merge(engine, None)
    assert answers(engine) == plain


def test_an_engine_of_one_merged_adapter_has_the_bits_of_merged_rows(engine, folder):
    merge(engine, "a0")
    want = answers(engine, ["a0"] * len(NAMES))
    with start(folder, "off", merge_adapter="a0") as primary:
        assert answers(primary, ["a0"] * len(NAMES)) == want
        for other in (None, "a1", {"a0": 0.5}):
            with pytest.raises(ValueError, match="serves it alone"):
                primary.generate(PROMPTS[:1], other, SCORED)
        primary.load_adapter("a0", folder / "a3", replace=True)
        with pytest.raises(ValueError, match="as it was at the start"):
            primary.generate(PROMPTS[:1], "a0", SCORED)
        settle(primary)


@pytest.mark.long
def test_rows_of_the_merged_adapter_have_the_bits_of_the_merged_checkpoint(engine, folder):
    merge(engine, "a0")
    before = steps(engine)
    got = answers(engine)
    after = steps(engine)
    assert after["mixture"] > before["mixture"]
    assert after["plain"] == before["plain"]
    runner = engine._loop._parts.runner
    model = folder / "merged"
    tiny_checkpoint.write_model(model, SHAPE)
    tensors = load_file(model / "model.safetensors")
    leaves = runner.merged.operands.leaves
    for m in runner.merged._maps:
        part = "mlp" if "proj" in m.module and m.module[0] in "gud" else "self_attn"
        name = f"model.layers.{m.layer}.{part}.{m.module}.weight"
        assert tensors[name].shape == leaves[m.leaf].shape
        tensors[name] = np.asarray(leaves[m.leaf])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with start(folder, "off", "merged", ()) as oracle:
        want = answers(oracle, [None] * len(NAMES))
    rows = [i for i, name in enumerate(NAMES) if name == "a0"]
    assert [got[i] for i in rows] == [want[i] for i in rows]


def test_rows_of_others_are_near_the_plain_ones_and_the_same_alone(engine, plain):
    merge(engine, "a0")
    got = answers(engine)
    for one, want in zip(got, plain, strict=True):
        near(one, want)
    assert got != plain
    for place in (1, 2, 4):
        (alone,) = engine.generate(PROMPTS[place : place + 1], NAMES[place], SCORED)
        assert answer(alone) == got[place]


@pytest.mark.long
@pytest.mark.parametrize("count", [8, 1000])
def test_random_switches_leave_plain_answers_as_they_are(engine, plain, count):
    digests = [digest_of(engine, name) for name in (None, "a0", "a1", "a2")]
    obey(engine, Restless(digests))
    before = engine._loop._parts.runner.merged.num_switches
    for _ in range(100 * count):
        for got, want in zip(answers(engine), plain, strict=True):
            near(got, want)
        if engine._loop._parts.runner.merged.num_switches >= before + count:
            break
    assert engine._loop._parts.runner.merged.num_switches >= before + count
    merge(engine, None)
    assert answers(engine) == plain


def test_an_adapter_may_be_replaced_and_unloaded_while_it_is_merged(engine, folder, plain):
    engine.load_adapter("new", folder / "a3")
    merge(engine, "new")
    first = answers(engine, ["new"] * len(NAMES))
    engine.load_adapter("new", folder / "a0", replace=True)
    got = answers(engine, ["new"] * len(NAMES))
    near(got[0], plain[0])
    assert got != first
    engine.unload_adapter("new")
    for one, want in zip(answers(engine), plain, strict=True):
        near(one, want)
    settle(engine)


def test_a_weighted_sum_can_be_merged(engine):
    parts = {"a0": 0.5, "a1": 0.25}
    merge(engine, None)
    (want,) = engine.generate(PROMPTS[:1], parts, SCORED)
    entries = [(engine.registry.get(name), weight) for name, weight in parts.items()]
    obey(engine, Fixed(engine.compose(entries).digest))
    before = steps(engine)["merged"]
    (got,) = engine.generate(PROMPTS[:1], parts, SCORED)
    assert steps(engine)["merged"] > before
    near(answer(got), answer(want))


def test_the_metrics_say_what_is_merged(engine):
    merge(engine, "a2")
    answers(engine, ["a2"] * len(NAMES))
    sample = engine.metrics.registry.get_sample_value
    assert sample("lora_jax:merge_steps_total", {"mode": "merged"}) == steps(engine)["merged"] > 0
    assert sample("lora_jax:merge_switches_total") > 0
    assert sample("lora_jax:merged_adapter_info", {"adapter": "a2"}) == 1


@pytest.mark.long
def test_exact_runs_rows_of_others_on_the_plain_weights_only(folder, plain):
    with start(folder, "exact") as engine:
        merge(engine, "a0")
        got = answers(engine)
        assert steps(engine)["mixture"] == 0
        assert steps(engine)["merged"] > 0
        for name, one, want in zip(NAMES, got, plain, strict=True):
            near(one, want)
            assert name == "a0" or one == want
        settle(engine)


@pytest.mark.long
def test_a_grammar_binds_rows_of_merged_steps(folder):
    """The same tokens merged, in a mixture and plain: bound rows run in two programs."""
    from serving import Sampling
    from serving.api.structured_outputs import StructuredOutputs

    bound = Sampling(
        max_tokens=8, temperature=0.0, structured_outputs=StructuredOutputs(regex="[0-9a-f]{6}")
    )
    with start(folder, "auto", structured_outputs=True) as engine:
        names = ["a0", "a1", "a0", None]
        want = [o.outputs[0].text for o in engine.generate(PROMPTS[:4], names, bound)]
        merge(engine, "a0")
        before = steps(engine)
        got = [o.outputs[0].text for o in engine.generate(PROMPTS[:4], names, bound)]
        assert got == want
        assert steps(engine)["plain"] == before["plain"]
        assert all(len(text) == 6 for text in got)


def test_a_model_without_room_for_a_second_copy_serves_without(folder, monkeypatch, caplog):
    from serving.engine.parts import merging

    monkeypatch.setattr(merging, "free_device_bytes", lambda config: 1000)
    config = EngineConfig(model=str(folder / "model"), lora_merge="auto")
    model = SimpleNamespace()
    monkeypatch.setattr(merging, "dense_map_bytes", lambda model: 2000)
    assert merging.make_merged(config, model) is None
    assert "lora_merge is off: a second copy" in caplog.text


def test_a_primary_that_cannot_be_merged_is_refused_by_name(engine):
    config = EngineConfig(model="m", merge_adapter="nobody")
    with pytest.raises(ValueError, match="merge_adapter 'nobody' is not among the adapters"):
        merge_primary(config, None, engine.registry)


def test_dense_maps_are_those_of_the_layers_only(engine, folder):
    runner = engine._loop._parts.runner
    assert runner.merged.modules == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
