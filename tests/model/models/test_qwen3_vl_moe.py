"""Qwen3-VL-MoE against transformers, its experts in both orientations."""

import numpy as np
import pytest
import transformers
from support.cases.tiny_qwen3_vl import ROPE, VISION, old_config
from support.contracts.model_contract import shaken
from support.contracts.vision_contract import VisionCase, VisionContract, make_vision_case
from support.drivers.vision_driver import END, IMAGE, QWEN_TEXT, START

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


class TestQwen3VLMoe(VisionContract):
    """Experts in every layer; 2 x 16 = 32 makes one matrix of each pair square."""

    peft_targets = (
        r"model\.language_model\..*\.q_proj"
        r"|model\.visual\..*(qkv|linear_fc1)"
    )
