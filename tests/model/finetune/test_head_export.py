"""A trained head in a PEFT folder is read back as it was."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from support.cases import adapter_cases as cases

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.task_head import SCORE, HeadKind, TaskHead, with_head
from lora_jax.finetune.head_export import add_head


def test_a_head_is_read_back(tmp_path):
    cases.write_adapter(tmp_path / "a", cases.dense_tensors())
    rng = np.random.default_rng(0)
    weight, bias = rng.normal(size=(2, 16)), rng.normal(size=2)
    head = TaskHead(HeadKind.CLASS, ("一", "b"))
    add_head(tmp_path / "a", head, weight, bias, np.dtype(ml_dtypes.bfloat16))
    weights = peft_format.read(tmp_path / "a", with_head(cases.llama(), 16, 2))
    assert weights.report.head == head
    site = weights.sites[SCORE, 0]
    want = weight.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(site.a[0], want)
    np.testing.assert_array_equal(site.b[0, 2, :2], bias.astype(ml_dtypes.bfloat16))
    assert len(weights.sites) == 3
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])


def test_a_head_alone(tmp_path):
    cases.write_adapter(tmp_path / "a", {})
    save_file({}, tmp_path / "a" / "adapter_model.safetensors")
    head = TaskHead(HeadKind.COUNT, ("0", "1"))
    add_head(tmp_path / "a", head, np.zeros((2, 16)), np.ones(2), np.dtype(np.float32))
    weights = peft_format.read(tmp_path / "a", with_head(cases.llama(), 16, 2))
    assert list(weights.sites) == [(SCORE, 0)]
