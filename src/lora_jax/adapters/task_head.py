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
_LIKELY = 0.5  # probability from which a label of a multi_label head is told
_WIDTH_STEP = 64  # logits are computed for a multiple of so many labels


class HeadKind(enum.StrEnum):
    """Kind of a task head; the value stands in task_head.json."""

    CLASS = "class"  # one of the labels: softmax
    MULTI_LABEL = "multi_label"  # any of the labels: a sigmoid each
    COUNT = "count"  # 0, 1, ... n as classes: softmax


@dataclasses.dataclass(frozen=True)
class HeadAnswer:
    """Answer of a head: a probability per label, and the label or labels it tells."""

    logits: tuple[float, ...]
    probs: tuple[float, ...]
    index: int  # of the most likely label, the first on a tie
    label: str
    labels: tuple[str, ...]  # multi_label: those that are likely; else the most likely one

    @property
    def text(self) -> str:
        """The answer as the content of a chat message."""
        return ", ".join(self.labels)


@dataclasses.dataclass(frozen=True)
class TaskHead:
    """What the numbers of a head stand for."""

    kind: HeadKind
    labels: tuple[str, ...]

    def answer(self, logits: np.ndarray) -> HeadAnswer:
        """Return the answer to float32 logits [width], of which the first are the labels'.

        It is computed in float64 from this row alone: equal logits give equal answers.
        """
        wide = np.asarray(logits, np.float64)[: len(self.labels)]
        probs = self.probabilities(wide)
        index = int(np.argmax(wide))
        several = self.kind is HeadKind.MULTI_LABEL
        chosen = [i for i, p in enumerate(probs) if p >= _LIKELY] if several else [index]
        return HeadAnswer(
            logits=tuple(wide.tolist()),
            probs=tuple(probs.tolist()),
            index=index,
            label=self.labels[index],
            labels=tuple(self.labels[i] for i in chosen),
        )

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return, [labels], 1 / (1 + e^-x) of each logit for multi_label, else e^x / sum e^x."""
        if self.kind is HeadKind.MULTI_LABEL:
            small = np.exp(-np.abs(logits))
            return np.where(logits >= 0, 1.0, small) / (1.0 + small)
        powers = np.exp(logits - logits.max())
        return powers / powers.sum()


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
