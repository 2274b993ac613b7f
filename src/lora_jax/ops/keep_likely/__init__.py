"""The likely tokens of each row of logits: what min_p, top_k and top_p keep."""

import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.dispatch import ANY, GPU, Implementation, Op, backend_kernel
from lora_jax.ops.keep_likely import reference, xla
from lora_jax.ops.keep_likely.reference import MOST_TOKENS, check_vocab
from lora_jax.typing import Array, Float, Int

__all__ = ["MOST_TOKENS", "check_vocab", "keep_likely"]

KEEP_LIKELY = Op(
    "keep_likely",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "keep_likely")),
        Implementation("xla", ANY, xla.keep_likely, stands_in=True),
        Implementation("reference", ANY, reference.keep_likely),
    ),
)


def keep_likely(
    logits: Float[Array, "rows vocab"],
    min_p: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    *,
    implementation: str | None = None,
) -> Float[Array, "rows vocab"]:
    """Return float32 logits with -inf for the tokens that a row drops: by min_p, top_k, then top_p.

    0, 0 and 1 keep everything; top_p is above 0. Tokens that tie with the last one kept stay. A row
    whose logits are not all numbers, or whose largest is infinite, has no meaning. top_k is int32.

    Raises:
        ValueError: min_p, top_k or top_p is not one number a row, top_k is no int32, or the
            vocabulary has more than MOST_TOKENS.
    """
    check_vocab(logits.shape[1])
    limits = {"min_p": min_p, "top_k": top_k, "top_p": top_p}
    rows = logits.shape[:1]
    checks.check_shapes("keep_likely", **{n: (tuple(a.shape), rows) for n, a in limits.items()})
    checks.check_dtype("keep_likely", jnp.int32, top_k=top_k)
    return KEEP_LIKELY.call(implementation, logits, min_p, top_k, top_p)
