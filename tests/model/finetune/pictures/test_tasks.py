"""Tasks: examples follow from the seed, and held-out pictures stay out of training."""

import numpy as np
import pytest

from lora_jax.finetune.pictures import scenes, tasks
from lora_jax.finetune.pictures.box_words import in_words


@pytest.mark.parametrize("task", tasks.TASKS)
def test_examples_follow_from_the_seed(picture_parts, task):
    one, two = (tasks.draw(task, picture_parts[False], 3, 5) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.images, b.images)
        assert (a.prompt, a.answer, a.labels, a.boxes) == (b.prompt, b.answer, b.labels, b.boxes)
        assert a.images.shape[1:] == (64, 64, 3)
        assert len(a.boxes) in (0, len(a.labels))
    (other,) = tasks.draw(task, picture_parts[False], 1, 6)
    assert not np.array_equal(one[0].images, other.images)


def test_no_held_out_picture_is_in_training(picture_parts):
    seen, held = ({e.answer for e in tasks.draw("name", p, 60, 0)} for p in picture_parts.values())
    assert len(seen) > 5
    assert len(held) > 5
    assert not seen & held


def test_halves_share_no_picture(picture_parts):
    for name, source in picture_parts[True].items():
        one, other = (half[name] for half in tasks.halves(picture_parts[True]))
        assert len(one.names) + len(other.names) == len(source.names)
        np.testing.assert_array_equal(one.images, source.images[::2])
        np.testing.assert_array_equal(other.names, source.names[1::2])


def test_kinds_and_places_of_a_list_are_those_of_its_boxes(picture_parts, monkeypatch):
    told, scene = [], scenes.scene

    def kept(*args):
        told.append(scene(*args))
        return told[-1]

    monkeypatch.setattr(scenes, "scene", kept)
    listed = tasks.draw("list", picture_parts[False], 10, 1)
    for example, drawn in zip(listed, told, strict=True):
        phrases = [phrase.split(" ", 1) for phrase in example.answer.split("; ")]
        kinds = [picture_parts[False]["things"].kinds[thing.row] for thing in drawn.things]
        assert [kind for kind, _ in phrases] == kinds
        for (_, place), thing in zip(phrases, drawn.things, strict=True):
            left, top, right, bottom = (side / scenes.SIDE for side in thing.box)
            row, column = (min(2, int(3 * (a + b) / 2)) for a, b in ((top, bottom), (left, right)))
            assert place == scenes.PLACES[3 * row + column]


def test_boxes_lie_in_the_image_and_are_told_in_words(picture_parts):
    for example in tasks.draw("boxes", picture_parts[False], 10, 1):
        assert example.answer == in_words(example.boxes)
        assert [kind for kind, _ in example.boxes] == list(example.labels)
        assert all(0 <= a < b <= 1 and 0 <= c < d <= 1 for _, (a, c, b, d) in example.boxes)
