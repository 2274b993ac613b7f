"""Documents laid into rows of one length, each attending to itself alone."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.finetune.documents import Document
from lora_jax.typing import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Packed text on the device. Padding is in segment -1 and weighs 0."""

    tokens: Int[Array, "rows length"]
    positions: Int[Array, "rows length"]  # in the piece of a document
    segments: Int[Array, "rows length"]  # which piece
    targets: Int[Array, "rows length"]  # the next token
    weights: Float[Array, "rows length"]  # 1 where the target counts


@dataclasses.dataclass(frozen=True)
class PackedText:
    """All rows of a text on the host; the fields are those of `Rows`."""

    tokens: Int[np.ndarray, "rows length"]
    positions: Int[np.ndarray, "rows length"]
    segments: Int[np.ndarray, "rows length"]
    targets: Int[np.ndarray, "rows length"]
    weights: Float[np.ndarray, "rows length"]

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    def take(self, indices: Int[np.ndarray, "chosen"]) -> Rows:
        """Return the rows at `indices` on the device."""
        fields = (self.tokens, self.positions, self.segments, self.targets, self.weights)
        return Rows(*(jnp.asarray(field[indices]) for field in fields))


def pieces(document: Document, length: int, answer_only: bool) -> list[tuple[list, list, list]]:
    """Cut a document into (tokens, targets, weights) of at most `length` positions each.

    A piece's last target is the first token of the next piece, so each token but the first is
    predicted once; with `answer_only` only those after the prompt count.
    """
    tokens = list(document.tokens)
    first = document.num_prompt if answer_only else 1
    cut = []
    for start in range(0, len(tokens) - 1, length):
        end = min(start + length, len(tokens) - 1)
        weights = [float(position + 1 >= first) for position in range(start, end)]
        cut.append((tokens[start:end], tokens[start + 1 : end + 1], weights))
    return cut


def pack(documents: Sequence[Document], length: int, *, answer_only: bool = False) -> PackedText:
    """Return rows that hold every document once: longest pieces first, each where it first fits.

    Raises ValueError when there is nothing to predict.
    """
    cut = [piece for document in documents for piece in pieces(document, length, answer_only)]
    if not cut:
        raise ValueError(f"{len(documents)} documents have nothing to predict")
    cut.sort(key=lambda piece: -len(piece[0]))
    places, used = first_fit([len(piece[0]) for piece in cut], length)
    shape = (len(used), length)
    rows = PackedText(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segments=np.full(shape, -1, np.int32),
        targets=np.zeros(shape, np.int32),
        weights=np.zeros(shape, np.float32),
    )
    for segment, ((tokens, targets, weights), (row, start)) in enumerate(
        zip(cut, places, strict=True)
    ):
        here = (row, slice(start, start + len(tokens)))
        rows.tokens[here], rows.targets[here] = tokens, targets
        rows.weights[here], rows.segments[here] = weights, segment
        rows.positions[here] = np.arange(len(tokens))
    return rows


def first_fit(sizes: Sequence[int], length: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Return (row, start) of each size in turn, and how much of each row is used."""
    used: list[int] = []
    places = []
    for size in sizes:
        row = next((r for r, u in enumerate(used) if u + size <= length), len(used))
        if row == len(used):
            used.append(0)
        places.append((row, used[row]))
        used[row] += size
    return places, used
