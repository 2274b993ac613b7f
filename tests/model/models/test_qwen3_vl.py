"""Qwen3-VL against transformers: tower rows, logits, both dialects, chunks anywhere."""

import pytest
import transformers
from support.cases.tiny_qwen3_vl import ROPE, VISION, old_config
from support.contracts.model_contract import shaken
from support.contracts.vision_contract import VisionCase, VisionContract, make_vision_case
from support.drivers.vision_driver import END, IMAGE, QWEN_TEXT, START


def make_qwen3_vl() -> transformers.Qwen3VLForConditionalGeneration:
    config = transformers.Qwen3VLConfig(
        text_config={**QWEN_TEXT, "rope_parameters": ROPE},
        vision_config=VISION,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=60,
    )
    transformers.set_seed(0)
    return shaken(transformers.Qwen3VLForConditionalGeneration(config)).eval()


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> VisionCase:
    tmp = tmp_path_factory.mktemp("qwen3_vl")
    return make_vision_case(tmp, make_qwen3_vl(), lambda tensors: tensors, old_config)


class TestQwen3VL(VisionContract):
    """Interleaved sections, deepstack, a resampled position table."""

    stands_for_others = True

    peft_targets = (
        r"model\.language_model\..*\.(q_proj|down_proj)"
        r"|model\.visual\..*(qkv|linear_fc1)"
    )

    @pytest.mark.long
    @pytest.mark.as_shipped
    def test_bucket_and_padding_do_not_change_a_bit(self, case):
        super().test_bucket_and_padding_do_not_change_a_bit(case)
