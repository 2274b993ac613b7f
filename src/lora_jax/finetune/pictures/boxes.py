"""Training and scoring of heads of kind boxes: the best pairing of queries and things (DETR)."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.task_head import Box, TaskHead
from lora_jax.finetune.pictures.tasks import Example
from lora_jax.typing import Array, Float

_BOX_WEIGHT = 5.0  # of a box's distance beside a label's cross entropy, DETR's
_NOTHING_WEIGHT = 0.4  # of a query that is paired with nothing
_MOST_PAIRINGS = 5040


def wanted_boxes(examples: Sequence[Example], head: TaskHead, most: int) -> dict[str, np.ndarray]:
    """Return labels, int32 [examples, most], -1 where no thing is, and boxes by middle and size.

    Raises ValueError for more things than `most`.
    """
    labels = np.full((len(examples), most), -1, np.int32)
    boxes = np.full((len(examples), most, 4), 0.5, np.float32)
    for row, example in enumerate(examples):
        if len(example.boxes) > most:
            raise ValueError(f"an image has {len(example.boxes)} boxes; at most {most} are learned")
        for column, (label, (left, top, right, bottom)) in enumerate(example.boxes):
            labels[row, column] = head.labels.index(label)
            middle = ((left + right) / 2, (top + bottom) / 2)
            boxes[row, column] = (*middle, right - left, bottom - top)
    return {"labels": labels, "boxes": boxes}


def boxes_loss(
    logits: Float[Array, "rows size"], wanted: dict[str, Array], head: TaskHead
) -> Float[Array, ""]:
    """Return the mean loss of the best pairing of each row's things with queries, all tried.

    Raises ValueError where there are too many pairings to try.
    """
    labels, boxes = wanted["labels"], wanted["boxes"]
    pairings = _pairings(head.queries, labels.shape[1])
    count = len(head.labels)
    shaped = logits.reshape(logits.shape[0], head.queries, -1)
    log_shares = jax.nn.log_softmax(shaped[..., : count + 1], axis=-1)
    places = jax.nn.sigmoid(shaped[..., count + 1 :])
    real = labels >= 0
    at = jnp.maximum(labels, 0)
    likely = jnp.take_along_axis(log_shares, at[:, None, :], axis=2)  # [rows, queries, things]
    apart = jnp.sum(jnp.abs(places[:, :, None] - boxes[:, None]), axis=-1)
    costs = jnp.where(real[:, None], _BOX_WEIGHT * apart - likely, 0.0)
    nothing = -_NOTHING_WEIGHT * log_shares[..., count]
    # A query that has a thing is spared what it would cost as one that has none.
    spared = costs - jnp.where(real[:, None], nothing[..., None], 0.0)
    things = jnp.arange(labels.shape[1], dtype=jnp.int32)
    totals = jnp.sum(spared[:, pairings, things[None]], axis=-1)
    best = jnp.argmin(jax.lax.stop_gradient(totals), axis=1)
    chosen = jnp.take_along_axis(totals, best[:, None], axis=1)[:, 0]
    return jnp.mean(chosen + jnp.sum(nothing, axis=1)) / head.queries


def _pairings(queries: int, things: int) -> np.ndarray:
    """Return int32 [pairings, things]: every choice of a query of its own for each thing."""
    every = list(
        itertools.islice(itertools.permutations(range(queries), things), 1 + _MOST_PAIRINGS)
    )
    if not 0 < len(every) <= _MOST_PAIRINGS:
        raise ValueError(f"{queries} queries for {things} things: no pairing, or too many to try")
    return np.array(every, np.int32)


def f1(answers: Sequence[Sequence[Box]], examples: Sequence[Example], least: float = 0.5) -> float:
    """Return 2 right / (found + there) over all images.

    A box is right if a thing of its label, not yet found, overlaps it by `least` (IoU) or more.
    """
    right = found = num_things = 0
    for boxes, example in zip(answers, examples, strict=True):
        left: list[Any] = list(example.boxes)
        found, num_things = found + len(boxes), num_things + len(left)
        for box in sorted(boxes, key=lambda b: -b.score):
            fits = [t for t in left if t[0] == box.label and iou(box.box, t[1]) >= least]
            if fits:
                left.remove(max(fits, key=lambda t: iou(box.box, t[1])))
                right += 1
    return 2 * right / max(found + num_things, 1)


def iou(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the area that two boxes share, as a part of what both cover."""
    sides = [
        max(0.0, min(one[axis + 2], other[axis + 2]) - max(one[axis], other[axis]))
        for axis in (0, 1)
    ]
    shared = sides[0] * sides[1]
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return shared / max(sum(areas) - shared, 1e-9)
