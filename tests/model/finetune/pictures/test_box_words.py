"""Boxes in words: a digit a side, and back to boxes within a tenth; other text tells none."""

import numpy as np

from lora_jax.adapters.task_head import Box
from lora_jax.finetune.pictures import boxes, tasks
from lora_jax.finetune.pictures.box_words import from_words, in_words


def test_the_edges_of_the_image_are_the_first_and_the_last_tenth():
    things = [("face", (0.0, 0.1, 0.999, 1.0)), ("food", (0.25, 0.349, 0.5, 0.65))]
    assert in_words(things) == "face 0199; food 2356"
    assert in_words([]) == ""
    assert from_words("face 0199") == (Box("face", 1.0, (0.05, 0.15, 0.95, 0.95)),)


def test_boxes_that_are_read_back_overlap_those_that_were_told(picture_parts):
    examples = tasks.draw("boxes", picture_parts[False], 30, 3)
    answers = [from_words(example.answer) for example in examples]
    assert boxes.f1(answers, examples) == 1.0
    for answer, example in zip(answers, examples, strict=True):
        assert [box.label for box in answer] == list(example.labels)
        for box, (_, sides) in zip(answer, example.boxes, strict=True):
            np.testing.assert_allclose(box.box, sides, atol=0.05 + 1e-9)


def test_text_without_four_digits_tells_no_box():
    for text in ("", "face", "face 123", "face 12345", "1234", " 1234", "face top left"):
        assert from_words(text) == ()
    left, right = from_words("face 1234; nothing here;  food 5678 ")
    assert (left.label, right.label) == ("face", "food")
