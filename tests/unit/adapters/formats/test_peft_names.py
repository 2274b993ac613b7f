"""Tensor names of a PEFT file: pairs, orphans, and the places they lead to."""

import gzip
import json

import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.formats.peft_names import find_target, pair_up
from lora_jax.adapters.formats.safetensors_file import AdapterTensor


def test_every_real_header_pairs_up_or_names_the_orphan(real_data):
    with gzip.open(real_data / "peft_configs" / "safetensors_headers.json.gz") as file:
        headers = json.load(file)
    orphans = {"anirudh-ak": "score.weight is", "branbot6": r"score.bias, .*score.weight are"}
    for repository, header in headers.items():
        tensors = {
            name: AdapterTensor(name, np.dtype(np.float32), tuple(shape), memoryview(b""))
            for name, (_, shape, _) in header["tensors"].items()
        }
        orphan = orphans.get(repository.split("/")[0])
        if orphan:
            with pytest.raises(ValueError, match=orphan):
                pair_up(tensors)
        else:
            assert 2 * len(pair_up(tensors)) == len(tensors)


def stored(*names: str) -> dict[str, AdapterTensor]:
    """Return tensors of these names, without data."""
    one = (np.dtype(np.float32), (1, 1), memoryview(b""))
    return {name: AdapterTensor(name, *one) for name in names}


def test_pairs_are_found_with_and_without_the_suffix():
    names = [
        "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight",
        "base_model.model.model.layers.0.mlp.experts.base_layer.lora_B.weight",
        "base_model.model.model.layers.0.mlp.experts.w1.lora_A",
        "base_model.model.model.layers.0.mlp.experts.w1.lora_B",
    ]
    pairs = pair_up(stored(*names))
    assert sorted(pairs) == [
        "model.layers.0.mlp.experts.base_layer",
        "model.layers.0.mlp.experts.w1",
    ]
    assert [pair.a.name for pair in pairs.values()] == names[::2]
    assert [pair.b.name for pair in pairs.values()] == names[1::2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.q_proj.lora_A.weight", "model.layers.0.q_proj.lora_A.weight is not a"),
        ("base_model.model.lm_head.base_layer.weight", "base_layer.weight is not a LoRA matrix"),
        ("base_model.model.embed_tokens.base_layer.weight", "base_layer.weight is not a LoRA"),
        ("base_model.model.x.lora_C.weight", "lora_C.weight is not a LoRA matrix"),
        ("base_model.model.x.lora_E", "lora_E is not a LoRA matrix"),
    ],
)
def test_a_name_that_is_not_lora_is_listed(name, message):
    good = stored("base_model.model.y.lora_A.weight", "base_model.model.y.lora_B.weight")
    with pytest.raises(ValueError, match=message):
        pair_up(good | stored(name))


def test_targets():
    target = find_target("model.layers.1.mlp.experts.2.up_proj", cases.deepseek_v2())
    assert target is not None
    assert (target.layer, target.expert, target.is_all_experts) == (1, 2, False)
    assert [module.name for module in target.modules] == ["experts.up_proj"]
    fused = find_target("transformer.blocks.0.norm_attn_norm.attn.Wqkv", cases.dbrx())
    assert fused is not None
    assert [module.name for module in fused.modules] == ["q_proj", "k_proj", "v_proj"]
    mla = find_target("model.layers.0.self_attn.kv_b_proj", cases.deepseek_v2())
    assert mla is not None
    assert mla.is_kv_b
    head = find_target("lm_head", cases.llama())
    assert head is not None
    assert head.layer == 0
    assert find_target("model.layers.0.mlp.nothing", cases.llama()) is None
    with pytest.raises(ValueError, match=r"has no experts\.up_proj in layer 0"):
        find_target("model.layers.0.mlp.experts.2.up_proj", cases.deepseek_v2())
