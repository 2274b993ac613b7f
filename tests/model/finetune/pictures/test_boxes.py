"""Boxes: the loss takes the best pairing of all, and found things are counted once."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.adapters.task_head import Box, HeadKind, TaskHead
from lora_jax.finetune.pictures import boxes, tasks

WHOLE = (0.0, 0.0, 1.0, 1.0)
HEAD = TaskHead(HeadKind.BOXES, ("a", "b"), 3)


def example(*found) -> tasks.Example:
    images = np.zeros((1, 64, 64, 3), np.uint8)
    return tasks.Example(images, "?", "", tuple(label for label, _ in found), found)


def test_the_loss_is_that_of_the_best_pairing():
    rng = np.random.default_rng(0)
    examples = [
        example(("a", (0.0, 0.0, 0.5, 0.5)), ("b", (0.5, 0.5, 1.0, 1.0))),
        example(("b", (0.1, 0.2, 0.4, 0.9))),
    ]
    wanted = boxes.wanted_boxes(examples, HEAD, 2)
    logits = rng.normal(size=(2, HEAD.size)).astype("f4")
    want = []
    for row in range(2):
        shaped = logits[row].reshape(3, 7).astype(float)
        said = shaped[:, :3] - np.log(np.exp(shaped[:, :3]).sum(-1, keepdims=True))
        place = 1 / (1 + np.exp(-shaped[:, 3:]))
        things = [n for n in range(2) if wanted["labels"][row, n] >= 0]

        def cost(chosen, row=row, said=said, place=place, things=things):
            total = 0.0
            for query in range(3):
                if query not in chosen:
                    total -= 0.4 * said[query, 2]
            for query, thing in zip(chosen, things, strict=True):
                apart = np.abs(place[query] - wanted["boxes"][row, thing]).sum()
                total += 5 * apart - said[query, wanted["labels"][row, thing]]
            return total

        want.append(min(cost(c) for c in itertools.permutations(range(3), len(things))))
    given = {name: jnp.asarray(value) for name, value in wanted.items()}
    got = float(boxes.boxes_loss(jnp.asarray(logits), given, HEAD))
    assert got == pytest.approx(np.mean(want) / 3, rel=1e-5)


def test_too_many_pairings_are_refused():
    many = TaskHead(HeadKind.BOXES, ("a",), 50)
    wanted = {"labels": jnp.zeros((1, 9), jnp.int32), "boxes": jnp.zeros((1, 9, 4))}
    with pytest.raises(ValueError, match="too many to try"):
        boxes.boxes_loss(jnp.zeros((1, many.size)), wanted, many)
    with pytest.raises(ValueError, match="has 2 boxes"):
        boxes.wanted_boxes([example(("a", WHOLE), ("b", WHOLE))], HEAD, 1)


def test_a_thing_is_found_once():
    there = example(("a", (0.0, 0.0, 0.5, 0.5)), ("b", (0.5, 0.5, 1.0, 1.0)))
    right, near = Box("a", 0.9, (0.0, 0.0, 0.5, 0.5)), Box("a", 0.8, (0.0, 0.0, 0.5, 0.45))
    assert boxes.f1([[right]], [there]) == pytest.approx(2 / 3)
    assert boxes.f1([[right, near]], [there]) == pytest.approx(2 / 4)
    wrong = Box("a", 0.9, (0.5, 0.5, 1.0, 1.0))
    assert boxes.f1([[wrong]], [there]) == 0
    assert boxes.iou(WHOLE, (0.5, 0.0, 1.5, 1.0)) == pytest.approx(1 / 3)
