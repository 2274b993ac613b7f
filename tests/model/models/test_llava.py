"""LLaVA-1.5 against transformers: CLIP's layer before the last, 1-D rope, sparse hub configs."""

import numpy as np
import pytest
import torch
import transformers
from support.contracts.model_contract import shaken
from support.contracts.vision_contract import VisionCase, VisionContract, make_vision_case
from support.drivers.vision_driver import IMAGE, QWEN_TEXT

from lora_jax.vision.processor import Patches

SIDE, PATCH = 24, 4


def make_llava() -> transformers.LlavaForConditionalGeneration:
    text = {name: value for name, value in QWEN_TEXT.items() if name != "head_dim"}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=24,
            intermediate_size=20,
            num_hidden_layers=4,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=PATCH,
            initializer_range=0.3,
        ),
        image_token_id=IMAGE,  # pyright: ignore[reportCallIssue]
    )
    transformers.set_seed(0)
    return shaken(transformers.LlavaForConditionalGeneration(config)).eval()


def hub_names(tensors: dict) -> dict:
    old = {
        "model.language_model.": "language_model.model.",
        "lm_head.": "language_model.lm_head.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    }
    renamed = {}
    for name, tensor in tensors.items():
        prefix = next((p for p in old if name.startswith(p) and not name.startswith(old[p])), None)
        renamed[name if prefix is None else old[prefix] + name.removeprefix(prefix)] = tensor
    renamed["vision_tower.vision_model.embeddings.position_ids"] = np.zeros((1, 37), np.float32)
    return renamed


def hub_config(config: dict) -> dict:
    text = config["text_config"]
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    config["image_token_id"] = config.pop("image_token_index")  # either is read
    config["torch_dtype"] = config.pop("dtype")
    return config


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> VisionCase:
    tmp = tmp_path_factory.mktemp("llava")
    return make_vision_case(tmp, make_llava(), hub_names, hub_config)


class TestLlava(VisionContract):
    """36 rows an image; the class row and the last layer have no part."""

    peft_targets = (
        r"model\.language_model\..*\.(q_proj|down_proj)"
        r"|model\.vision_tower\..*layers\.[0-2]\..*(q_proj|fc1)|.*linear_1"
    )

    def pixels(self, case: VisionCase, images: list[Patches]) -> torch.Tensor:
        count = SIDE // PATCH
        values = np.stack([image.normalised(case.tower.settings) for image in images])
        cut = values.reshape(-1, count, count, 3, PATCH, PATCH).transpose(0, 3, 1, 4, 2, 5)
        return torch.from_numpy(cut.reshape(-1, 3, SIDE, SIDE).copy())

    def oracle_rows(self, case: VisionCase, image: Patches) -> list[np.ndarray]:
        with torch.no_grad():
            out = case.oracle.get_image_features(
                pixel_values=self.pixels(case, [image]),
                vision_feature_layer=-2,
                vision_feature_select_strategy="default",
            )
        return [out.pooler_output[0].numpy()]

    def oracle_of_images(self, case: VisionCase, tokens: list[int]) -> np.ndarray:
        with torch.no_grad():
            pixels = self.pixels(case, case.images)
            out = case.oracle(input_ids=torch.tensor([tokens]), pixel_values=pixels)
        return out.logits[0].float().numpy()
