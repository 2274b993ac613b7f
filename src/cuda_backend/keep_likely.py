"""The likely tokens of each row, by csrc/keep_likely: one launch for 150 of XLA's."""

import jax
import jax.numpy as jnp

from cuda_backend import ffi
from lora_jax.typing import Array, Float, Int


def keep_likely(
    logits: Float[Array, "rows vocab"],
    min_p: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
) -> Float[Array, "rows vocab"]:
    """Return what lora_jax.ops.keep_likely does."""
    ffi.require()
    call = jax.ffi.ffi_call(
        "lora_jax_cuda_keep_likely", jax.ShapeDtypeStruct(logits.shape[:1], jnp.float32)
    )
    least = call(logits, min_p, top_k.astype(jnp.int32), top_p)
    return jnp.where(logits < least[:, None], -jnp.inf, logits)  # a NaN stays
