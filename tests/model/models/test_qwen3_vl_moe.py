"""Qwen3-VL-MoE against transformers, its experts in both orientations."""

import numpy as np
import pytest
import transformers
from support.cases.tiny_qwen3_vl import ROPE, VISION, old_config
from support.contracts.model_contract import shaken
from support.contracts.vision_contract import VisionCase, VisionContract, make_vision_case
from support.drivers.model_driver import hub_copy
from support.drivers.vision_driver import END, IMAGE, QWEN_TEXT, START

from lora_jax.models import load

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def make_qwen3_vl_moe() -> transformers.Qwen3VLMoeForConditionalGeneration:
    config = transformers.Qwen3VLMoeConfig(
        text_config={**QWEN_TEXT, **MOE, "rope_parameters": ROPE},
        vision_config=VISION,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=60,
        tie_word_embeddings=False,
    )
    transformers.set_seed(0)
    return shaken(transformers.Qwen3VLMoeForConditionalGeneration(config)).eval()


def other_orientation(tensors: dict) -> dict:
    """The last two axes of experts the other way round; gate and up are square here."""
    experts = (".experts.gate_up_proj", ".experts.down_proj")
    return {
        name: np.swapaxes(tensor, 1, 2) if name.endswith(experts) else tensor
        for name, tensor in tensors.items()
    }


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> VisionCase:
    tmp = tmp_path_factory.mktemp("qwen3_vl_moe")
    return make_vision_case(tmp, make_qwen3_vl_moe(), other_orientation, old_config)


def experts_apart(tensors: dict) -> dict:
    """Each expert's maps in tensors of their own, as tools that quantise maps write them."""
    apart = {}
    for name, tensor in tensors.items():
        at, _, kind = name.rpartition(".experts.")
        if not at:
            apart[name] = tensor
        for expert, matrix in enumerate(tensor if at else ()):
            names = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
            parts = zip(names, np.split(matrix, len(names)), strict=True)
            apart |= {f"{at}.experts.{expert}.{n}.weight": part for n, part in parts}
    return apart


def test_experts_in_tensors_of_their_own(case, tmp_path):
    folder = hub_copy(case.folders["transformers"], tmp_path / "apart", experts_apart, old_config)
    model, _ = load(folder)
    for got, want in zip(model.layers, case.model.layers, strict=True):
        for name in ("gate_proj", "up_proj", "down_proj"):
            got_values, want_values = (getattr(of.mlp.experts, name)[...] for of in (got, want))
            np.testing.assert_array_equal(got_values, want_values)


class TestQwen3VLMoe(VisionContract):
    """Experts in every layer; 2 x 16 = 32 makes one matrix of each pair square."""

    peft_targets = (
        r"model\.language_model\..*\.q_proj"
        r"|model\.visual\..*(qkv|linear_fc1)"
    )
