"""The command trains the chosen experts alone, and an interrupted run ends as an unbroken one."""

import hashlib
import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from support.cases.finetune_cases import (
    RECORDS,
    fit_nothing,
    make_folder,
    num_learned,
    share_compiled_step,
)
from support.cases.quantised_checkpoints import MOE, write_pair

from lora_jax.finetune import esft
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.esft_export import merge_checkpoint
from lora_jax.finetune.esft_params import chosen_experts
from lora_jax.finetune.perplexity import Evaluator
from lora_jax.finetune.records import write_jsonl
from lora_jax.finetune.training import Schedule
from lora_jax.models import load

SELECTION = {0: (2, 0), 1: (3,)}
SCHEDULE = Schedule(steps=6, batch_rows=1, learning_rate=2e-2, warmup_steps=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("base") / "tiny", scale=5.0)


@pytest.mark.long
def test_interrupted_and_resumed_equals_unbroken(folder, tmp_path, monkeypatch):
    share_compiled_step(monkeypatch)
    model, _ = load(folder, dtype="float32")
    documents = read_format(folder).documents(RECORDS, "chat")
    before = [np.asarray(x) for x in jax.tree.leaves(nnx.split(model, graph=False)[1])]

    def run(name: str, stop_after: int | None = None):
        state = tmp_path / name
        return esft.train_esft(
            model, documents, 32, SELECTION, SCHEDULE, folder=state, stop_after=stop_after
        )

    whole = run("whole")
    run("parts", stop_after=2)
    parts = run("parts")
    for want, got in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(got, want)
    start = jax.tree.leaves(chosen_experts(model, SELECTION))
    for old, new in zip(start, jax.tree.leaves(whole), strict=True):
        assert (np.abs(np.asarray(new - old)).max(axis=(1, 2)) > 0).all()  # each expert learned
    after = jax.tree.leaves(nnx.split(model, graph=False)[1])
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new, old)
    with pytest.raises(ValueError, match="other experts"):
        esft.train_esft(
            model, documents, 32, {0: (1,)}, SCHEDULE, folder=tmp_path / "whole", stop_after=1
        )


def test_the_command_trains_the_chosen_experts_and_no_bit_else(folder, tmp_path):
    write_jsonl(tmp_path / "data.jsonl", RECORDS)
    before = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    out, merged = tmp_path / "adapter", tmp_path / "merged"
    esft.main(
        [
            *("--model", str(folder), "--data", str(tmp_path / "data.jsonl"), "--out", str(out)),
            *("--score", "gate", "--top-p", "0.4", "--steps", "25", "--batch-rows", "2"),
            *("--length", "32", "--learning-rate", "0.02"),
        ]
    )
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == before
    config = json.loads((out / "expert_cfg.json").read_text())
    assert set(config["experts"]) == {"0", "1"}
    merge_checkpoint(folder, out, merged)
    base, new, ours = (load_file(p / "model.safetensors") for p in (folder, merged, out))
    wanted = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
        for layer, experts in config["experts"].items()
        for expert in experts
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    assert set(ours) == wanted
    assert set(new) == set(base)
    for name, value in base.items():
        same = np.array_equal(value.view(np.uint16), new[name].view(np.uint16))
        assert same == (name not in wanted), name
    documents = read_format(folder).documents(RECORDS, "chat")
    perplexity = [
        Evaluator(load(path, dtype="float32")[0], 32).measure(documents).perplexity
        for path in (folder, merged)
    ]
    assert perplexity[1] < 0.8 * perplexity[0]
    state = tmp_path / "adapter.training"
    steps = [json.loads(line)["step"] for line in (state / "loss.jsonl").read_text().splitlines()]
    assert steps == list(range(25))
    scores = json.loads((state / "summary.json").read_text())["gate_scores"]
    for layer, experts in config["experts"].items():
        best = sorted(scores[layer].items(), key=lambda item: -item[1])
        assert [int(expert) for expert, _ in best][: len(experts)] == experts
        assert sum(value for _, value in best[: len(experts)]) >= 0.4


@pytest.mark.parametrize("answer_only", [False, True])
def test_answer_only_learns_the_answers_alone(folder, monkeypatch, answer_only):
    model, _ = load(folder, dtype="float32")
    documents = read_format(folder).documents(RECORDS, "chat")
    fitted = fit_nothing(monkeypatch, esft)
    esft.train_esft(model, documents, 32, SELECTION, SCHEDULE, answer_only=answer_only)
    assert fitted[0].weights.sum() == num_learned(documents, answer_only)


def test_a_quantised_base_is_refused_by_name(tmp_path):
    quantised, _ = write_pair(tmp_path, "int4", MOE)
    (tmp_path / "none.jsonl").touch()
    command = ["--model", str(quantised), "--data", str(tmp_path / "none.jsonl")]
    command += ["--out", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=r"quantised is quantised \(compressed-tensors\); an ESFT"):
        esft.main(command)
