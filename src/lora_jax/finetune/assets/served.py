"""Perplexity of a model as it is served: over pages, by serving's kernels.

`perplexity` measures by the dense pass of training; this by the model's own call, with which
adapters that replace experts can be used too.
"""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.batch import ForwardBatch
from lora_jax.finetune.documents import Document
from lora_jax.finetune.packing import PackedText, pack
from lora_jax.finetune.perplexity import Measured
from lora_jax.finetune.training import token_losses
from lora_jax.kv_cache import PagedKVCache, init_cache
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Array, Bool, Float, Int

PAGE_SIZE = 16


@dataclasses.dataclass(frozen=True)
class TextAndAnswer:
    """The same text measured over every token but the first, and over the answers' tokens.

    `right` answer tokens were the most likely ones. Of `answers`, `exact` had no others: those are
    what greedy decoding gives. An answer that was cut counts once per piece.
    """

    text: Measured
    answer: Measured
    right: int
    answers: int
    exact: int


class ServedEvaluator:
    """Measures one model on documents cut to pieces of at most `length` tokens, without LoRA."""

    def __init__(self, model: AbstractCausalLM, length: int):
        graphdef, self._state = nnx.split(model, graph=False)
        self._length, self._shape = length, model.kv_shape(model.config)
        self._dtype = jnp.dtype(model.embed.weight.dtype)

        def losses(
            state: Any, batch: ForwardBatch, targets: Int[Array, "tokens"], cache: PagedKVCache
        ) -> tuple[Float[Array, "tokens"], Bool[Array, "tokens"], PagedKVCache]:
            served = nnx.merge(graphdef, state)
            hidden, cache = served(batch, cache, None, 0)
            logits = served.logits(hidden, batch.num_tokens, batch.token_to_slot, None, 0)
            right = jnp.argmax(logits, axis=-1).astype(targets.dtype) == targets
            return token_losses(logits[None], targets[None])[0], right, cache

        self._losses = jax.jit(losses, donate_argnames="cache")

    def measure(
        self,
        documents: Sequence[Document],
        esft_slot: int = -1,
        reroute_tables: Int[np.ndarray, "moe_layers esft_slots experts"] | None = None,
    ) -> TextAndAnswer:
        """Return the measures; with tables, every token uses the experts of row `esft_slot`."""
        rows = pack(documents, self._length)
        answers = pack(documents, self._length, answer_only=True).weights
        # One number for all texts, or nearly, so that the program is compiled once.
        num_seqs = max(self._length // 4, int(rows_to_seqs(rows).max(initial=0)) + 1)
        cache = init_cache(self._shape, self._num_pages(num_seqs), PAGE_SIZE, self._dtype)
        tables = None if reroute_tables is None else jnp.asarray(reroute_tables, jnp.int32)
        nats, counts = np.zeros(2), np.zeros(3, np.int64)
        for row in range(rows.num_rows):
            batch = self._batch(rows, row, num_seqs)
            if tables is not None:
                slots = jnp.where(jnp.asarray(rows.segments[row]) < 0, -1, jnp.int32(esft_slot))
                batch = dataclasses.replace(batch, token_to_esft_slot=slots, reroute_tables=tables)
            targets = jnp.asarray(rows.targets[row])
            losses, right, cache = self._losses(self._state, batch, targets, cache)
            wide = np.asarray(losses).astype(np.float64)
            nats += wide @ rows.weights[row], wide @ answers[row]
            counts += count_answers(np.asarray(right), answers[row] > 0, rows.segments[row])
        return TextAndAnswer(
            Measured(float(nats[0]), int(rows.weights.sum())),
            Measured(float(nats[1]), int(answers.sum())),
            *(int(count) for count in counts),
        )

    def with_weights_of(self, model: AbstractCausalLM) -> "ServedEvaluator":
        """Return an evaluator of another model of the same shape that shares what is compiled."""
        other = copy.copy(self)
        _, other._state = nnx.split(model, graph=False)
        return other

    def _num_pages(self, num_seqs: int) -> int:
        return -(-self._length // PAGE_SIZE) + num_seqs

    def _batch(self, rows: PackedText, row: int, num_seqs: int) -> ForwardBatch:
        """Return one row's pieces, each a sequence with pages of its own."""
        seqs, positions = rows_to_seqs(rows)[row], rows.positions[row]
        real = seqs >= 0
        tables = np.zeros((num_seqs, -(-self._length // PAGE_SIZE)), np.int32)
        first = 0
        for seq in range(seqs.max(initial=-1) + 1):
            count = -(-int((seqs == seq).sum()) // PAGE_SIZE)
            tables[seq, :count] = np.arange(first, first + count)
            first += count
        places = tables[seqs, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        outside = self._num_pages(num_seqs) * PAGE_SIZE
        return ForwardBatch(
            tokens=jnp.asarray(rows.tokens[row]),
            positions=jnp.asarray(positions),
            token_to_seq=jnp.asarray(np.maximum(seqs, 0)),
            token_to_slot=jnp.full(len(seqs), -1, jnp.int32),
            token_to_page_slot=jnp.asarray(np.where(real, places, outside).astype(np.int32)),
            block_tables=jnp.asarray(tables),
            num_tokens=jnp.asarray(real.sum(), jnp.int32),
        )


def count_answers(
    right: Bool[np.ndarray, "length"],
    in_answer: Bool[np.ndarray, "length"],
    segments: Int[np.ndarray, "length"],
) -> tuple[int, int, int]:
    """Return how many answer tokens are right, how many answers there are, and how many all are."""
    answers, wrong = set(segments[in_answer]), set(segments[in_answer & ~right])
    return int((in_answer & right).sum()), len(answers), len(answers - wrong)


def rows_to_seqs(rows: PackedText) -> Int[np.ndarray, "rows length"]:
    """Return for every place which piece of its row it is in, from 0 on; -1 is padding."""
    starts = np.diff(rows.segments, axis=1, prepend=-1) != 0
    seqs = np.cumsum(starts, axis=1) - 1
    return np.where(rows.segments < 0, -1, seqs).astype(np.int32)
