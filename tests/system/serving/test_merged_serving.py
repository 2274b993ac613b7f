"""Merged weights together with ESFT adapters, pairs, experts' LoRA, images, heads, drafts."""

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest
from support.cases import tiny_checkpoint
from support.cases.adapter_cases import write_adapter
from support.cases.engine_cases import SHAPES, settle
from support.cases.head_cases import write_head
from support.cases.tiny_vision import HOLDER, picture, write_qwen3_vl, write_vision_adapter

from serving import Engine, Sampling
from serving.scheduling.merge_policy import PLAIN, MergeTarget

pytestmark = pytest.mark.long
SHIPPED = Path(__file__).parents[3] / "assets" / "tiny-moe"
ASKED = Sampling(max_tokens=6, temperature=0, logprobs=1, ignore_eos=True)


class Fixed:
    """A policy that says what it is told."""

    def __init__(self, digest):
        self.digest = digest

    def next(self, target, rows, can_merge):
        return MergeTarget(self.digest)


def merge(engine, name, prompt):
    digest = PLAIN if name is None else engine.registry.get(name).digest
    engine._loop._parts.scheduler.modes.policy = Fixed(digest)
    engine.generate([prompt], None, ASKED)
    settle(engine)


def ask(engine, prompts, adapters, **more):
    outputs = engine.generate(prompts, adapters, ASKED, **more)
    choices = [output.outputs[0] for output in outputs]
    return [(c.token_ids, np.array([p.logprob for p in c.logprobs])) for c in choices]


def check(engine, merged, prompts, adapters, **more):
    """All rows on merged weights are near those on plain ones, and not all the same bits."""
    merge(engine, None, "plain")
    want = ask(engine, prompts, adapters, **more)
    merge(engine, merged, "merged")
    before = dict(engine._loop._parts.runner.merged.steps)
    got = ask(engine, prompts, adapters, **more)
    after = engine._loop._parts.runner.merged.steps
    assert after["mixture"] > before["mixture"]
    assert after["plain"] == before["plain"]
    for one, other in zip(got, want, strict=True):
        assert one[0] == other[0]
        np.testing.assert_allclose(one[1], other[1], rtol=0, atol=1e-3)
    assert any((one[1] != other[1]).any() for one, other in zip(got, want, strict=True))
    merge(engine, None, "plain")
    again = ask(engine, prompts, adapters, **more)
    assert all((a[1] == b[1]).all() for a, b in zip(again, want, strict=True))
    settle(engine)


def write_dense(folder: Path, seed: int) -> str:
    """Write an adapter on the queries of the shipped model; return its folder."""
    rng, tensors = np.random.default_rng(seed), {}
    for layer in range(4):
        path = f"model.layers.{layer}.self_attn.q_proj"
        tensors[f"{path}.lora_A.weight"] = rng.normal(0, 0.1, (4, 128)).astype(np.float32)
        tensors[f"{path}.lora_B.weight"] = rng.normal(0, 0.05, (128, 4)).astype(np.float32)
    write_adapter(folder, tensors, {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]})
    return str(folder)


@pytest.mark.gpu
def test_on_a_gpu_answers_are_those_of_the_adapter_that_was_merged_last(tmp_path):
    """The shadow is written behind jax's back; a step must read what the last switch wrote."""
    adapters = {name: write_dense(tmp_path / name, seed) for seed, name in enumerate("ab")}
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "max_loras": 2}
    sizes |= {"max_esft_adapters": 0, "structured_outputs": False, "max_lora_rank": 8}
    prompts = ["a word", "another one", "the third"]

    def asked(engine, name):
        merge(engine, name, "merged")
        return [(ids, p.tolist()) for ids, p in ask(engine, prompts, [name] * len(prompts))]

    with Engine(str(SHIPPED), adapters, lora_merge="exact", **sizes) as engine:
        assert engine._loop._parts.runner.merged._shadow._written is not None
        first = {name: asked(engine, name) for name in (None, "a", "b")}
        assert first["a"] != first["b"] != first[None] != first["a"]
        for name in random.Random(0).choices(list(first), k=40):
            assert asked(engine, name) == first[name]
    with Engine(str(SHIPPED), adapters, merge_adapter="b", **sizes) as engine:
        alone = ask(engine, prompts, ["b"] * len(prompts))
        assert [(ids, p.tolist()) for ids, p in alone] == first["b"]


def test_esft_pairs_and_adapters_of_experts(tmp_path):
    esft = sorted((SHIPPED / "esft").iterdir())[0]
    adapters = {
        "dense": write_dense(tmp_path / "dense", 0),
        "law": SHIPPED / "adapters" / "law",
        "esft": esft,
    }
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64, "max_loras": 4}
    with Engine(
        str(SHIPPED),
        {name: str(path) for name, path in adapters.items()},
        dtype="float32",
        lora_merge="auto",
        structured_outputs=False,
        max_lora_rank=16,
        **sizes,
    ) as engine:
        pair = {"dense": 1, "esft": 1}
        names = ["dense", None, "law", "esft", "dense", pair]
        check(engine, "dense", ["the court of"] * len(names), names)
        merge(engine, "law", "x")  # which changes experts: nothing is merged
        before = dict(engine._loop._parts.runner.merged.steps)
        ask(engine, ["the court of"], ["law"])
        after = engine._loop._parts.runner.merged.steps
        assert after["merged"] + after["mixture"] == before["merged"] + before["mixture"]


def test_images(tmp_path):
    write_qwen3_vl(tmp_path / "tiny")
    for seed, name in enumerate(("text", "tower"), 1):
        write_vision_adapter(tmp_path / name, seed, tower=name == "tower")
    adapters = {name: str(tmp_path / name) for name in ("text", "tower")}
    with Engine(
        str(tmp_path / "tiny"),
        adapters,
        lora_merge="auto",
        structured_outputs=False,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=4,
        max_loras=4,
        max_lora_rank=8,
    ) as engine:
        engine._loop._parts.residencies.of("lora")._mergeable._mixture = False  # random, and large
        names, look = ["text", "tower", None], f"look: {HOLDER} what?"
        images = [[picture(40, 24, 1)]] * 3
        check(engine, "text", [look] * 3, names, images=images)


def test_task_heads(tmp_path):
    shape = SHAPES["llama"]
    tiny_checkpoint.write_model(tmp_path / "tiny", shape)
    tiny_checkpoint.write_adapter(tmp_path / "plain", shape, 4, 1, strength=0.1)
    tiny_checkpoint.write_adapter(tmp_path / "headed", shape, 3, 2, strength=0.1)
    weight = np.random.default_rng(0).normal(size=(3, shape.hidden))
    write_head(tmp_path / "headed", ["a", "b", "c"], weight)
    adapters = {name: str(tmp_path / name) for name in ("plain", "headed")}
    prompt = list(range(5, 25))
    with Engine(
        str(tmp_path / "tiny"),
        adapters,
        dtype="float32",
        lora_merge="auto",
        structured_outputs=False,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        max_lora_rank=8,
    ) as engine:
        want = engine.classify([prompt], "headed")[0].outputs.probs
        merge(engine, "plain", prompt)
        before = dict(engine._loop._parts.runner.merged.steps)
        got = engine.classify([prompt], "headed")[0].outputs.probs
        after = engine._loop._parts.runner.merged.steps
        assert after["mixture"] > before["mixture"]
        assert tuple(got) != tuple(want)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
        merge(engine, "headed", prompt)  # which has more than dense maps: nothing is merged
        assert tuple(engine.classify([prompt], "headed")[0].outputs.probs) == tuple(want)
        settle(engine)


def test_speculation(tmp_path):
    shape = SHAPES["llama"]
    tiny_checkpoint.write_model(tmp_path / "tiny", shape)
    for seed, name in enumerate(("a", "b")):
        tiny_checkpoint.write_adapter(tmp_path / name, shape, 3, seed, strength=0.1)
    names, prompts = ["a", None, "b", "a"], [[7, 8, 9, 10 + n] * 6 for n in range(4)]
    asked, answers = dataclasses.replace(ASKED, max_tokens=40), []
    for config in ({}, {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}):
        with Engine(
            str(tmp_path / "tiny"),
            {name: str(tmp_path / name) for name in ("a", "b")},
            dtype="float32",
            lora_merge="auto",
            speculative_config=config,
            structured_outputs=False,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            max_lora_rank=8,
        ) as engine:
            merge(engine, "a", prompts[0])
            outputs = engine.generate(prompts, names, asked)
            answers.append(
                [
                    (o.outputs[0].token_ids, [p.logprob for p in o.outputs[0].logprobs])
                    for o in outputs
                ]
            )
            assert engine._loop._parts.runner.merged.steps["mixture"] > 0
            settle(engine)
            sample = engine.metrics.registry.get_sample_value
            drafts = sample("vllm:spec_decode_num_drafts_total", engine.metrics.labels)
    assert answers[0] == answers[1]
    assert drafts > 0
