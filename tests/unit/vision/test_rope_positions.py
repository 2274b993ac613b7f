"""Positions of prompts with images against transformers, and how they go on."""

import dataclasses

import numpy as np
import torch
import transformers
from support.cases.tiny_qwen3_vl import ROPE, VISION
from support.cases.vision_configs import TOWER
from support.drivers.vision_driver import IMAGE, QWEN_TEXT

from lora_jax.config import from_hf
from lora_jax.vision.rope_positions import rope_positions

QWEN3 = dataclasses.replace(TOWER, image_token_id=IMAGE)


def test_positions_are_those_of_transformers_and_go_on_after_the_prompt():
    config = transformers.Qwen3VLConfig(
        text_config={**QWEN_TEXT, "rope_parameters": ROPE},
        vision_config=VISION,
        image_token_id=IMAGE,
    )
    vision = from_hf(config.to_dict()).tower
    grids = [(4, 10), (6, 2)]
    tokens = [1, 2] + [IMAGE] * 10 + [3] + [IMAGE] * 3 + [4, 5, 6]
    with torch.device("meta"):
        model = transformers.Qwen3VLModel(config)
    ids = torch.tensor([tokens])
    want, delta = model.get_rope_index(
        ids, (ids == IMAGE).int(), torch.tensor([[1, *grid] for grid in grids])
    )
    got = rope_positions(vision, True, [(2, grids[0]), (13, grids[1])], 30)
    np.testing.assert_array_equal(got[:, : len(tokens)], want[:, 0].numpy())
    later = np.arange(len(tokens), 30) + int(delta)
    np.testing.assert_array_equal(got[:, len(tokens) :], np.stack([later] * 3))


def test_without_sections_a_position_is_the_index():
    got = rope_positions(QWEN3, False, [(2, (4, 4))], 9)
    np.testing.assert_array_equal(got, np.stack([np.arange(9)] * 3))
