"""Token masks of sequence rows on the device: one bit for each token that a row may take.

The host fills the masks of rows that a grammar binds, while the step's forward part runs; see
compiled_step. Rows without a mask keep their logits bit for bit.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lora_jax.typing import Array, Bool, Float, Int

_BITS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenMasks:
    """Masks by sequence row; bit b of word w allows token 32 w + b."""

    words: Int[Array, "seqs words"]
    is_masked: Int[Array, "seqs"]  # 0: every token is allowed, whatever the words say


def num_words(vocab: int) -> int:
    """Return the int32 words of one row's mask."""
    return -(-vocab // _BITS)


def host_masks(max_seqs: int, vocab: int) -> TokenMasks:
    """Return masks of numpy arrays in which no row is masked yet."""
    words = np.empty((max_seqs, num_words(vocab)), np.int32)
    return TokenMasks(words, np.zeros(max_seqs, np.int32))  # type: ignore[arg-type]


def allowed_tokens(words: Int[Array, "*rows words"], vocab: int) -> Bool[Array, "*rows vocab"]:
    """Return which tokens the words allow."""
    places = lax.broadcasted_iota(jnp.int32, (*words.shape, _BITS), words.ndim)
    bits = (words[..., None] >> places) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab] != 0


def mask_row(
    logits: Float[Array, "vocab"],
    masks: TokenMasks,
    seq: Int[Array, ""],
    is_sampled: Bool[Array, ""],
) -> Float[Array, "vocab"]:
    """Return the logits with tokens that are not allowed at -inf; only a sampled row is masked."""
    return lax.cond(
        is_sampled & (masks.is_masked[seq] != 0),
        lambda: jnp.where(allowed_tokens(masks.words[seq], logits.shape[0]), logits, -jnp.inf),
        lambda: logits,
    )


def mask_rows(
    logits: Float[Array, "rows vocab"],
    masks: TokenMasks,
    row_to_seq: Int[Array, "rows"],
    is_sampled: Bool[Array, "rows"],
) -> Float[Array, "rows vocab"]:
    """Return what mask_row does, of all rows at once."""
    allowed = allowed_tokens(masks.words[row_to_seq], logits.shape[1])
    free = ~(is_sampled & (masks.is_masked[row_to_seq] != 0))
    return jnp.where(allowed | free[:, None], logits, -jnp.inf)
