"""Qwen2.5-VL against transformers: windows ragged at the edges, M-RoPE in blocks, the flat file."""

import numpy as np
import pytest
import transformers
from support.contracts.model_contract import shaken
from support.contracts.vision_contract import VisionCase, VisionContract, make_vision_case
from support.drivers.model_driver import hub_copy
from support.drivers.vision_driver import END, IMAGE, QWEN_TEXT, START
from support.oracles.quantised_files import FORMATS, random_nf4

from lora_jax.models import load

BLOCKSIZE = 16  # of weights with a scale; rows of the tower's down_proj have 20
VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "window_size": 16,  # 2 x 2 cells of 8 pixels
    "fullatt_block_indexes": [1],
    "initializer_range": 0.3,
}


def make_qwen2_5_vl() -> transformers.Qwen2_5_VLForConditionalGeneration:
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 2, 1]}
    text = {name: value for name, value in QWEN_TEXT.items() if name != "head_dim"}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config=VISION,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=60,
    )
    transformers.set_seed(0)
    return shaken(transformers.Qwen2_5_VLForConditionalGeneration(config)).eval()


def flat_config(config: dict) -> dict:
    """As the hub's file: the language model's keys on the outer level."""
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config["vision_config"]["model_type"] = "qwen2_5_vl"
    config["torch_dtype"] = config.pop("dtype")
    return {**text, **config}


def hub_names(tensors: dict) -> dict:
    renamed = {}
    for name, tensor in tensors.items():
        plain = name.replace("model.language_model.", "model.", 1)
        renamed[plain.replace("model.visual.", "visual.", 1)] = tensor
    return renamed


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> VisionCase:
    tmp = tmp_path_factory.mktemp("qwen2_5_vl")
    return make_vision_case(tmp, make_qwen2_5_vl(), hub_names, flat_config)


def test_a_tower_in_nf4_with_blocks_that_continue_in_the_next_row(case, tmp_path):
    """bitsandbytes quantises towers, too; 64 divides not all of their rows."""
    values = {}

    def quantised(tensors: dict) -> dict:
        coded = dict(tensors)
        for n, name in enumerate(sorted(tensors)):
            shape = tensors[name].shape
            if ".mlp.down_proj.weight" not in name or "visual" not in name:
                continue
            stored = random_nf4(shape, np.random.default_rng(n), blocksize=BLOCKSIZE)
            site = name.removesuffix("weight")
            del coded[name]
            coded |= {site + part: tensor for part, tensor in stored.tensors.items()}
            values[name] = stored.values
        return coded

    section = {"quantization_config": FORMATS["nf4"].section}
    source = case.folders["transformers"]
    folder = hub_copy(source, tmp_path / "nf4", quantised, lambda config: config | section)
    model, _ = load(folder)
    assert values
    for block, want in zip(model.tower.blocks, values.values(), strict=True):
        assert want.shape[1] % BLOCKSIZE
        np.testing.assert_array_equal(block.down_proj.weight[...], want)


class TestQwen25VL(VisionContract):
    """Windows of two by two cells, three and seven cells wide images."""

    peft_targets = (
        r"model\.language_model\..*\.(q_proj|down_proj)"
        r"|model\.visual\..*(qkv|gate_proj|mlp\.0)"
    )
