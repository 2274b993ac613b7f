"""A base model learns from random weights, can be interrupted, and is read back as written."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from support.cases.finetune_cases import CONFIG, RECORDS, make_folder, share_compiled_step

from lora_jax.config import from_hf
from lora_jax.finetune.assets.pretrain import pretrain, qwen3_moe_tensors, save_qwen3_moe
from lora_jax.finetune.documents import Document
from lora_jax.finetune.training import Schedule
from lora_jax.models import build, load

DOCUMENTS = [
    Document(tuple(np.random.default_rng(i).integers(0, 9, 20).tolist()), 0) for i in (1, 2)
]
SCHEDULE = Schedule(steps=6, batch_rows=2, learning_rate=1e-2, warmup_steps=1)


def leaves(model) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(nnx.split(model, graph=False)[1])]


@pytest.mark.slow
def test_interrupted_and_resumed_equals_unbroken(tmp_path, monkeypatch):
    share_compiled_step(monkeypatch)
    whole = pretrain(CONFIG, DOCUMENTS, 16, SCHEDULE, folder=tmp_path / "whole")
    pretrain(CONFIG, DOCUMENTS, 16, SCHEDULE, folder=tmp_path / "parts", stop_after=4)
    parts = pretrain(CONFIG, DOCUMENTS, 16, SCHEDULE, folder=tmp_path / "parts")
    for want, got in zip(leaves(whole), leaves(parts), strict=True):
        np.testing.assert_array_equal(got, want)
    lines = (tmp_path / "whole" / "loss.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < losses[0] - 0.1


def test_a_saved_model_is_read_back(tmp_path):
    make_folder(tmp_path)
    model, config = load(tmp_path, dtype="float32")
    assert config == from_hf(CONFIG)
    stored = load_file(tmp_path / "model.safetensors")
    tensors = qwen3_moe_tensors(model)
    assert set(stored) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(np.asarray(tensor), stored[name].astype(np.float32))
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [2, 0], "pad_token_id": 0}


def test_a_model_with_dense_layers_is_not_saved_as_one_of_experts(tmp_path):
    model = build(from_hf(CONFIG | {"mlp_only_layers": [1]}))
    with pytest.raises(ValueError, match="layer 1 is no mixture"):
        save_qwen3_moe(model, CONFIG, tmp_path)


def test_there_is_text_to_train_on():
    assert len({r.prompt for r in RECORDS}) == len(RECORDS)
