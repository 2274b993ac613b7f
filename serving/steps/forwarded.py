"""Results of a step's forward part, which its sample part takes."""

from typing import NamedTuple

import jax.numpy as jnp

from lora_jax.typing import Array, Float
from serving.steps.sampling.sampler import LogitRows
from serving.steps.step import StepSizes


class Forwarded(NamedTuple):
    """A forward part that is on its way: what the sample part takes of it."""

    logits: Float[Array, "rows vocab"]
    rows: LogitRows
    heads: Float[Array, "seqs width"] | None = None  # logits of task heads


def no_logits(sizes: StepSizes, bucket: int, vocab: int) -> Forwarded:
    """Return arrays of the shapes of a forward part's results."""
    rows = sizes.logit_rows(bucket)
    columns = [jnp.zeros(rows, jnp.int32) for _ in range(5)]
    logits = jnp.zeros((rows, vocab), jnp.float32)
    return Forwarded(logits, LogitRows(jnp.int32(0), *columns), no_heads(sizes))


def no_heads(sizes: StepSizes) -> Float[Array, "seqs width"] | None:
    """Return logits of task heads in which nobody asked one; None where there are no heads."""
    shape = sizes.max_seqs, sizes.head_width
    return jnp.zeros(shape, jnp.float32) if sizes.head_width else None
