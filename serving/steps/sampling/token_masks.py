"""Token masks of logit rows on the device: one bit for each token that a row may take.

The host fills the masks of rows that a grammar binds, while the step's forward part runs; see
compiled_step. A sequence with drafts has a mask for each of its rows. Rows without a mask keep
their logits bit for bit.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lora_jax.typing import Array, Bool, Float, Int

_BITS = 32
NO_MASK = -1  # of a row that may take every token


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenMasks:
    """Masks, and which one each logit row has; bit b of word w allows token 32 w + b."""

    words: Int[Array, "masks words"]
    row_to_mask: Int[Array, "rows"]  # NO_MASK: every token is allowed


class HostMasks:
    """Masks in the host's memory, in one piece, so that one copy brings them to the device."""

    def __init__(self, num_masks: int, num_rows: int, vocab: int, packed: np.ndarray | None = None):
        """No row has a mask yet, and no mask a meaning; `packed` is memory for them."""
        size = num_masks * num_words(vocab)
        self.packed = np.empty(size + num_rows, np.int32) if packed is None else packed
        self.words = self.packed[:size].reshape(num_masks, -1)
        self.row_to_mask = self.packed[size:]
        self.row_to_mask[:] = NO_MASK


def unpack_masks(packed: Int[Array, "numbers"], num_masks: int, vocab: int) -> TokenMasks:
    """Return the masks of HostMasks.packed."""
    size = num_masks * num_words(vocab)
    return TokenMasks(packed[:size].reshape(num_masks, -1), packed[size:])


def num_words(vocab: int) -> int:
    """Return the int32 words of one mask."""
    return -(-vocab // _BITS)


def allowed_tokens(words: Int[Array, "*rows words"], vocab: int) -> Bool[Array, "*rows vocab"]:
    """Return which tokens the words allow."""
    places = lax.broadcasted_iota(jnp.int32, (*words.shape, _BITS), words.ndim)
    bits = (words[..., None] >> places) & 1
    return bits.reshape(*words.shape[:-1], -1)[..., :vocab] != 0


def mask_row(
    logits: Float[Array, "vocab"],
    masks: TokenMasks,
    row: Int[Array, ""],
    is_sampled: Bool[Array, ""],
) -> Float[Array, "vocab"]:
    """Return a row's logits with tokens that are not allowed at -inf; only if it is sampled."""
    mask = masks.row_to_mask[row]
    return lax.cond(
        is_sampled & (mask >= 0),
        lambda: jnp.where(allowed_tokens(masks.words[mask], logits.shape[0]), logits, -jnp.inf),
        lambda: logits,
    )


def mask_rows(
    logits: Float[Array, "rows vocab"], masks: TokenMasks, is_sampled: Bool[Array, "rows"]
) -> Float[Array, "rows vocab"]:
    """Return what mask_row does, of all rows at once."""
    mask = masks.row_to_mask[: logits.shape[0]]
    allowed = allowed_tokens(masks.words[jnp.maximum(mask, 0)], logits.shape[1])
    free = ~(is_sampled & (mask >= 0))
    return jnp.where(allowed | free[:, None], logits, -jnp.inf)
