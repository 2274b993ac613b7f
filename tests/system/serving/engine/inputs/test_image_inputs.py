"""Images of Python callers in their prompts, and models that take none."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.cases.tiny_vision import picture, png
from support.cases.vision_configs import SETTINGS, TOWER

from serving.engine.images.front import ImageFront
from serving.engine.inputs.generate_arguments import GivenPrompt
from serving.engine.inputs.image_inputs import placed_images, read_prompts

FRONT = ImageFront(TOWER, SETTINGS, placeholder="<image>", max_images=2, max_image_tokens=64)
TOKENIZER: Any = SimpleNamespace(encode_again=lambda text: [9 if c == "*" else 1 for c in text])


def test_prompts_of_every_kind_have_their_images():
    small = picture(16, 16)
    prompts = [
        GivenPrompt("a*b", None, (small,)),
        GivenPrompt("words", None),
        GivenPrompt(None, (9, 3), (png(picture(8, 8)),)),
    ]
    ids, placed = read_prompts([TOKENIZER] * len(prompts), FRONT, prompts)
    assert ids == [[1, 9, 9, 9, 9, 1], [1] * 5, [9, 3]]
    assert [[start for _, start in images] for images in placed] == [[1], [], [0]]
    (image,) = placed_images(FRONT, ids[0], placed[0], None)
    assert (image.start, image.end) == (1, 5)


def test_a_model_of_text_takes_no_images():
    prompts = [GivenPrompt("a*", None, (picture(8, 8),))]
    with pytest.raises(ValueError, match="takes text only"):
        read_prompts([TOKENIZER] * len(prompts), None, prompts)
    _, placed = read_prompts([TOKENIZER] * len(prompts), FRONT, prompts)
    with pytest.raises(ValueError, match="takes text only"):
        placed_images(None, [1, 9], placed[0], None)
    assert placed_images(None, [1, 9], (), None) == ()


def test_too_many_are_refused_before_any_is_decoded():
    prompts = [GivenPrompt("***", None, ("no file",) * 3)]
    with pytest.raises(ValueError, match="At most 2 image"):
        read_prompts([TOKENIZER] * len(prompts), FRONT, prompts)
