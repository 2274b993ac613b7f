"""Every spelling of a language model's tensors and paths leads to one place."""

from pathlib import Path

import numpy as np
import pytest
from support.cases.adapter_cases import write_adapter

from lora_jax.adapters.catalogue import LoraModule
from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.formats.peft_names import find_target
from lora_jax.config import from_hf
from lora_jax.models.llama import Llama
from lora_jax.models.sources import Oriented, Slice, Stack, Tensor, Transpose, weight
from lora_jax.models.vision_names import join_catalogues, renamed, respelled_weights
from lora_jax.nn.adapter_sites import rule

CONFIG = from_hf(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
)
TOWER = [LoraModule("visual.fc", 8, 8, (0, 1, 2, 3))]
RULES = (rule("visual.blocks.{layer}.fc", "visual.fc"),)
CATALOGUE = join_catalogues(Llama.catalogue(CONFIG), TOWER, RULES, "tiny_vl")


def test_nested_sources_are_renamed_at_their_leaves():
    one, other = Tensor("model.a"), Stack("model.{expert}.b", 2)
    made = Slice(Oriented(Transpose(one), (2, 3), other, (4, 4)), 0, 0, 1)
    got = renamed(made, "model.", "x.")
    assert got == Slice(
        Oriented(Transpose(Tensor("x.a")), (2, 3), Stack("x.{expert}.b", 2), (4, 4)), 0, 0, 1
    )


def test_every_rule_has_every_spelling():
    rules = respelled_weights([weight("norm", "model.norm"), weight("head", "lm_head.weight")])
    names = [[next(source.names()) for source in r.sources] for r in rules]
    assert names == [
        ["model.language_model.norm", "language_model.model.norm", "model.norm"],
        ["lm_head.weight", "language_model.lm_head.weight"],
    ]


@pytest.mark.parametrize(
    "prefix", ["model", "model.language_model", "language_model.model", "language_model"]
)
def test_paths_of_adapters_lead_to_the_language_model(prefix: str):
    target = find_target(f"{prefix}.layers.1.self_attn.q_proj", CATALOGUE)
    assert target is not None
    assert (target.modules[0].name, target.layer) == ("q_proj", 1)


def folder_with(tmp_path: Path, *paths: str) -> Path:
    """A PEFT folder with LoRA of rank 2 on q_proj at these paths."""
    tensors = {}
    for path in paths:
        tensors[f"{path}.lora_A.weight"] = np.ones((2, 32), np.float32)
        tensors[f"{path}.lora_B.weight"] = np.ones((32, 2), np.float32)
    return write_adapter(tmp_path, tensors, {"r": 2, "target_modules": ["q_proj"]})


@pytest.mark.parametrize(
    "prefix", ["model", "model.language_model", "language_model.model", "language_model"]
)
def test_files_of_every_spelling_give_one_adapter(tmp_path: Path, prefix: str):
    read = peft_format.read(folder_with(tmp_path, f"{prefix}.layers.0.self_attn.q_proj"), CATALOGUE)
    assert list(read.sites) == [("q_proj", 0)]


def test_wrong_prefixes_and_two_spellings_of_one_site_are_refused_by_name(tmp_path: Path):
    wrong = folder_with(tmp_path / "a", "model.text_model.layers.0.self_attn.q_proj")
    with pytest.raises(ValueError, match=r"tiny_vl\) has no module model.text_model"):
        peft_format.read(wrong, CATALOGUE)
    paths = (f"{at}.layers.0.self_attn.q_proj" for at in ("model", "model.language_model"))
    with pytest.raises(ValueError, match="under two names"):
        peft_format.read(folder_with(tmp_path / "b", *paths), CATALOGUE)


def test_adapters_of_another_tower_are_refused_by_name(tmp_path: Path):
    """One that is wider, and one with more layers."""
    config = {"r": 2, "target_modules": ["fc"]}
    for layer, width, wanted in ((0, 12, "visual.blocks.0.fc"), (9, 8, "no visual.fc in layer 9")):
        path = f"visual.blocks.{layer}.fc"
        shapes = {f"{path}.lora_A.weight": (2, width), f"{path}.lora_B.weight": (width, 2)}
        tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
        with pytest.raises(ValueError, match=wanted):
            peft_format.read(write_adapter(tmp_path / str(layer), tensors, config), CATALOGUE)


def test_heads_and_towers_are_found_and_wrong_prefixes_are_not():
    for path in ("lm_head", "language_model.lm_head"):
        assert find_target(path, CATALOGUE).modules[0].name == "lm_head"
    assert find_target("visual.blocks.3.fc", CATALOGUE).layer == 3
    for path in ("text.layers.1.self_attn.q_proj", "model.text_model.layers.0.mlp.up_proj"):
        assert find_target(path, CATALOGUE) is None
    assert CATALOGUE.num_layers == 4
    with pytest.raises(ValueError, match="no q_proj in layer 3"):
        find_target("model.layers.3.self_attn.q_proj", CATALOGUE)
