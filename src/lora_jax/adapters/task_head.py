"""Task heads of adapters (V-LoRA, arXiv 2411.00915): their meaning, in numpy. No jax.

A head maps the state of the last prompt token, after the final norm, to a number per label. It is
part of an adapter: the state is the base model's with the adapter's LoRA, if it has any.
"""

import dataclasses
import enum

import numpy as np

from lora_jax.adapters.catalogue import WHOLE, LoraCatalogue, LoraModule

SCORE = "score"  # module of the catalogue, and PEFT's name of a classifier's last layer
MAX_LABELS = 1024
MAX_LABEL_TEXT = 256  # characters
_LIKELY = 0.5  # probability from which a label of a multi_label head is told
_WIDTH_STEP = 64  # logits are computed for a multiple of so many labels


class HeadKind(enum.StrEnum):
    """Kind of a task head; the value stands in task_head.json."""

    CLASS = "class"  # one of the labels: softmax
    MULTI_LABEL = "multi_label"  # any of the labels: a sigmoid each
    COUNT = "count"  # 0, 1, ... n as classes: softmax
    BOXES = "boxes"  # things of an image and their boxes, some queries at once


@dataclasses.dataclass(frozen=True)
class Box:
    """A thing that a head of kind boxes found; sides are parts of the image's, 0 to 1."""

    label: str
    score: float  # probability of the label
    box: tuple[float, float, float, float]  # left, top, right, bottom

    def __str__(self) -> str:
        return f"{self.label} [{', '.join(f'{side:.3f}' for side in self.box)}]"


@dataclasses.dataclass(frozen=True)
class HeadAnswer:
    """Answer of a head: a probability per label, and the label or labels it tells.

    Of boxes a label's probability is that of its most likely box.
    """

    logits: tuple[float, ...]
    probs: tuple[float, ...]
    index: int  # of the most likely label, the first on a tie
    label: str
    # multi_label: those that are likely; boxes: those of the boxes; else the most likely one.
    labels: tuple[str, ...]
    boxes: tuple[Box, ...] | None = None  # in the order of the queries; None: another kind

    @property
    def text(self) -> str:
        """The answer as the content of a chat message."""
        return ", ".join(self.labels if self.boxes is None else map(str, self.boxes))


@dataclasses.dataclass(frozen=True)
class TaskHead:
    """The meaning of a head's numbers.

    Each of the `queries` of a head of kind boxes has a logit per label, one for nothing, and four
    numbers whose sigmoids are the middle of its box (x, y), its width and its height.
    """

    kind: HeadKind
    labels: tuple[str, ...]
    queries: int = 0

    @property
    def size(self) -> int:
        """Number of outputs: one row of the head's weight each."""
        return self.queries * (len(self.labels) + 5) if self.queries else len(self.labels)

    def answer(self, logits: np.ndarray) -> HeadAnswer:
        """Return the answer to float32 logits [width], of which the first are the head's.

        It is computed in float64 from this row alone: equal logits give equal answers.
        """
        if self.kind is HeadKind.BOXES:
            return self._found(np.asarray(logits, np.float64)[: self.size])
        wide = np.asarray(logits, np.float64)[: len(self.labels)]
        probs, index = self.probabilities(wide).tolist(), int(wide.argmax())
        label, labels = self.labels[index], ()
        if self.kind is HeadKind.MULTI_LABEL:
            pairs = zip(self.labels, probs, strict=True)
            labels = tuple([one for one, probability in pairs if probability >= _LIKELY])
        else:
            labels = (label,)
        return HeadAnswer(tuple(wide.tolist()), tuple(probs), index, label, labels)

    def _found(self, logits: np.ndarray) -> HeadAnswer:
        """Return the boxes of the queries that are not most likely nothing."""
        rows, count = logits.reshape(self.queries, -1), len(self.labels)
        probs = np.stack([softmax(row) for row in rows[:, : count + 1]])
        boxes = []
        for row, likely in zip(rows, probs, strict=True):
            best = int(np.argmax(likely))
            if best < count:
                x, y, width, height = sigmoid(row[count + 1 :])
                sides = (x - width / 2, y - height / 2, x + width / 2, y + height / 2)
                left, top, right, bottom = np.clip(sides, 0.0, 1.0).tolist()
                boxes.append(
                    Box(self.labels[best], float(likely[best]), (left, top, right, bottom))
                )
        each = probs[:, :count].max(axis=0)
        index = int(np.argmax(each))
        return HeadAnswer(
            logits=tuple(logits.tolist()),
            probs=tuple(each.tolist()),
            index=index,
            label=self.labels[index],
            labels=tuple(box.label for box in boxes),
            boxes=tuple(boxes),
        )

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return, [labels], 1 / (1 + e^-x) of each logit for multi_label, else e^x / sum e^x."""
        if self.kind is HeadKind.MULTI_LABEL:
            return sigmoid(logits)
        return softmax(logits)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + e^-x) of each number."""
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return e^x / sum e^x."""
    # Reductions of ufuncs: methods of arrays take a detour through Python to the same sums.
    powers = np.exp(logits - np.maximum.reduce(logits))
    return powers / np.add.reduce(powers)


def head_logits(
    state: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
    """Return W h + b in float32 [labels], of h [hidden] and W [labels, hidden].

    The step computes it by the grouped LoRA product.
    """
    logits = np.asarray(weight, np.float32) @ np.asarray(state, np.float32)
    return logits if bias is None else logits + np.asarray(bias, np.float32)


def head_width(labels: int) -> int:
    """Return the width of logits that so many labels have room in; 0 for 0."""
    return -(-labels // _WIDTH_STEP) * _WIDTH_STEP


def with_head(catalogue: LoraCatalogue, hidden: int, labels: int) -> LoraCatalogue:
    """Return the catalogue with room for a head of up to `labels` labels beside each adapter.

    A head is the LoRA of a map that is 0: W [labels, hidden] are rank rows of width `hidden`, and
    B gives row j to logit j. Its site has one more row of B, the bias.
    """
    width = head_width(labels)
    module = LoraModule(SCORE, hidden, width, (0,), split=WHOLE, most_rank=width)
    return dataclasses.replace(catalogue, modules={**catalogue.modules, SCORE: module})
