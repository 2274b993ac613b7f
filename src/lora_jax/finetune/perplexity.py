"""Perplexity of a model, with or without an adapter, on held-out text."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.finetune.documents import Document
from lora_jax.finetune.forward import forward
from lora_jax.finetune.lora_params import LoraDelta
from lora_jax.finetune.packing import PackedText, Rows, pack
from lora_jax.finetune.training import token_losses
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Array, Float

BATCH_ROWS = 4


@dataclasses.dataclass(frozen=True)
class Measured:
    """The sum of -ln p over `tokens` predicted tokens."""

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a token."""
        return math.exp(self.nats / self.tokens)


class Evaluator:
    """Measures one model on documents cut to pieces of at most `length` tokens."""

    def __init__(self, model: AbstractCausalLM, length: int):
        graphdef, self._state = nnx.split(model, graph=False)
        self._length = length

        @jax.jit
        def score(state: Any, delta: LoraDelta | None, batch: Rows) -> Float[Array, ""]:
            merged = nnx.merge(graphdef, state)
            out = forward(merged, batch.tokens, batch.positions, batch.segments, delta)
            return jnp.sum(token_losses(out.logits, batch.targets) * batch.weights)

        self._score = score

    def measure(
        self,
        documents: Sequence[Document],
        delta: LoraDelta | None = None,
        *,
        answer_only: bool = False,
    ) -> Measured:
        """Return the measure over every token but the first, or over the answers' tokens."""
        rows = pack(documents, self._length, answer_only=answer_only)
        nats = 0.0
        for start in range(0, rows.num_rows, BATCH_ROWS):
            nats += float(self._score(self._state, delta, padded(rows, start)))
        return Measured(nats, int(rows.weights.sum()))


def padded(rows: PackedText, start: int) -> Rows:
    """Return BATCH_ROWS rows from `start` on; rows past the end repeat the last, weighing 0."""
    indices = [min(start + i, rows.num_rows - 1) for i in range(BATCH_ROWS)]
    batch = rows.take(np.asarray(indices))
    real = jnp.asarray([start + i < rows.num_rows for i in range(BATCH_ROWS)], jnp.float32)
    return dataclasses.replace(batch, weights=batch.weights * real[:, None])
