"""The command trains an adapter that helps, and an interrupted run ends as an unbroken one."""

import hashlib
import json

import jax
import numpy as np
import pytest
from support.cases.finetune_cases import (
    RECORDS,
    fit_nothing,
    make_folder,
    num_learned,
    share_compiled_step,
)

from lora_jax.adapters.formats import peft_format
from lora_jax.finetune import lora
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.lora_params import LoraSpec, loaded_delta
from lora_jax.finetune.perplexity import Evaluator
from lora_jax.finetune.records import write_jsonl
from lora_jax.finetune.training import Schedule
from lora_jax.models import load

SPEC = LoraSpec(2, 4.0, ("q_proj", "experts.gate_proj", "experts.up_proj"))
SCHEDULE = Schedule(steps=6, batch_rows=1, learning_rate=2e-2, warmup_steps=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("base") / "tiny", scale=5.0)


@pytest.mark.slow
def test_interrupted_and_resumed_equals_unbroken(folder, tmp_path, monkeypatch):
    share_compiled_step(monkeypatch)
    model, _ = load(folder, dtype="float32")
    documents = read_format(folder).documents(RECORDS, "chat")

    def run(name: str, stop_after: int | None = None):
        return lora.train_lora(
            model, documents, 32, SPEC, SCHEDULE, folder=tmp_path / name, stop_after=stop_after
        )

    whole = run("whole")
    run("parts", stop_after=2)
    parts = run("parts")
    for want, got in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(got, want)
    assert all(float(abs(pair.b).max()) > 0 for pair in whole.values())


def test_the_command_writes_an_adapter_that_lowers_perplexity(folder, tmp_path):
    write_jsonl(tmp_path / "data.jsonl", RECORDS)
    before = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    out = tmp_path / "adapter"
    lora.main(
        [
            *("--model", str(folder), "--data", str(tmp_path / "data.jsonl"), "--out", str(out)),
            *("--rank", "2", "--steps", "25", "--batch-rows", "2", "--length", "32"),
            *("--learning-rate", "0.02", "--per-expert", "--rslora", "--dtype", "bfloat16"),
        ]
    )
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == before
    model, config = load(folder, dtype="float32")
    weights = peft_format.read(out, model.catalogue(config), base_names=("tiny",))
    assert weights.report.warnings == ()
    assert {"q_proj", "experts.down_proj"} <= set(weights.report.modules)
    assert not {"router", "lm_head"} & set(weights.report.modules)
    documents = read_format(folder).documents(RECORDS, "chat")
    evaluator = Evaluator(model, 32)
    base = evaluator.measure(documents).perplexity
    assert evaluator.measure(documents, loaded_delta(weights)).perplexity < 0.7 * base
    lines = (tmp_path / "adapter.training" / "loss.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(25))


@pytest.mark.parametrize("answer_only", [False, True])
def test_answer_only_learns_the_answers_alone(folder, monkeypatch, answer_only):
    model, _ = load(folder, dtype="float32")
    documents = read_format(folder).documents(RECORDS, "chat")
    fitted = fit_nothing(monkeypatch, lora)
    lora.train_lora(model, documents, 32, SPEC, SCHEDULE, answer_only=answer_only)
    assert fitted[0].weights.sum() == num_learned(documents, answer_only)
