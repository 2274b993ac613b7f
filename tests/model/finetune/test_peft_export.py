"""Exported folders mean to PEFT, and to our own reader, what was trained."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from support.cases.finetune_cases import CONFIG, dense, random_pairs
from support.drivers.model_driver import random_model

from lora_jax.adapters.formats import peft_format
from lora_jax.finetune.assets.pretrain import save_qwen3_moe
from lora_jax.finetune.lora_params import (
    LoraSpec,
    loaded_delta,
    trained_delta,
)
from lora_jax.finetune.peft_export import save_adapter
from lora_jax.models import load

QWEN = CONFIG | {"vocab_size": 64}
SHARED = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
MIXTRAL = SHARED | {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 20}
LLAMA = SHARED | {"model_type": "llama", "intermediate_size": 20}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")
SPECS = {
    "fused": LoraSpec(3, 6.0, ATTENTION + EXPERTS),
    "fused rslora": LoraSpec(4, 6.0, ("q_proj", "v_proj", *EXPERTS), use_rslora=True),
    "per expert": LoraSpec(2, 5.0, ATTENTION + EXPERTS, fused_experts=False),
    "gate and up": LoraSpec(3, 6.0, EXPERTS[:2]),
    "down": LoraSpec(3, 6.0, EXPERTS[2:]),
    "attention": LoraSpec(3, 6.0, ATTENTION),
}
SOME = ("fused rslora", "attention")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A random Qwen3-MoE on disk, and the same model read back in float32."""
    folder = tmp_path_factory.mktemp("qwen")
    save_qwen3_moe(random_model(QWEN)[0], QWEN, folder)
    return folder, load(folder, dtype="float32")[0]


def our_logits(model, ids: np.ndarray, delta=None) -> np.ndarray:
    places = np.arange(ids.shape[1], dtype=np.int32)[None]
    inputs = tuple(jnp.asarray(x) for x in (ids, places, np.zeros_like(ids)))
    return np.asarray(dense(model, inputs, delta).logits)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers, of its own names
@pytest.mark.filterwarnings("ignore:.*_pattern keys:RuntimeWarning")  # PEFT, of its own rewriting
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in SOME else pytest.mark.long) for n in SPECS]
)
def test_peft_gives_the_logits_of_the_trained_adapter(qwen, tmp_path, name):
    folder, model = qwen
    spec, catalogue = SPECS[name], model.catalogue(model.config)
    pairs = random_pairs(spec, catalogue)
    save_adapter(tmp_path, pairs, spec, catalogue, base_name="qwen")
    ids = np.arange(2, 11, dtype=np.int32)[None]
    want = our_logits(model, ids, trained_delta(pairs, spec, catalogue))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    with torch.no_grad():
        got = adapted(input_ids=torch.from_numpy(ids).long()).logits.numpy()
    effect = np.abs(want - our_logits(model, ids)).max()
    assert effect > 0.05
    np.testing.assert_allclose(got, want, atol=2e-4 * max(effect, np.abs(want).max()))


@pytest.mark.parametrize("raw", [QWEN, MIXTRAL, LLAMA], ids=lambda raw: raw["model_type"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_our_reader_finds_what_was_trained(tmp_path, raw, fused, dtype):
    model, config = random_model(raw)
    catalogue = model.catalogue(config)
    modules = tuple(n for n in catalogue.module_names if n != "router" or not fused)
    spec = LoraSpec(3, 6.0, modules, fused_experts=fused)
    pairs = random_pairs(spec, catalogue)
    save_adapter(tmp_path, pairs, spec, catalogue, base_name="some", dtype=dtype)
    got = loaded_delta(peft_format.read(tmp_path, catalogue)).sites
    want = trained_delta(pairs, spec, catalogue).sites
    assert set(got) == set(want)
    for key, site in want.items():
        assert got[key].scaling == pytest.approx(site.scaling)
        for a, b in ((got[key].a, site.a), (got[key].b, site.b)):
            np.testing.assert_array_equal(a, np.asarray(b).astype(dtype).astype(np.float32))


def test_the_config_says_what_the_file_holds(tmp_path):
    model, config = random_model(QWEN)
    catalogue = model.catalogue(config)
    spec = SPECS["fused rslora"]
    save_adapter(tmp_path, random_pairs(spec, catalogue), spec, catalogue, base_name="tiny")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert config["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 6.0, True)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 2 * 4
    prefix = "base_model.model.model.layers.1.mlp.experts"
    assert tensors[f"{prefix}.base_layer.lora_A.weight"].shape == (16, 32)
    assert tensors[f"{prefix}.lora_B.weight"].shape == (32, 16)


def test_a_module_without_a_file_name_is_refused(tmp_path):
    model, config = random_model(LLAMA)
    catalogue = model.catalogue(config)
    spec = LoraSpec(2, 4.0, ("q_proj",))
    pairs = random_pairs(spec, catalogue)
    nameless = type(catalogue)(catalogue.model_type, 2, catalogue.modules, rules=())
    with pytest.raises(ValueError, match="no file name is known for module q_proj"):
        save_adapter(tmp_path, pairs, spec, nameless, base_name="x")
