"""Norm, rotation and page writes of heads as three steps of portable JAX."""

import jax.numpy as jnp

from lora_jax.ops.pages import write
from lora_jax.ops.place_heads.args import PlaceHeadsArgs
from lora_jax.ops.rms_norm import rms_norm
from lora_jax.ops.rotary import rotate
from lora_jax.typing import Array


def place_heads(args: PlaceHeadsArgs) -> tuple[Array, Array, Array]:
    """Same result as the reference."""
    q, k = turned(args)
    places = args.token_to_page_slot
    return q, write(args.k_pages, k, places), write(args.v_pages, args.v, places)


def turned(args: PlaceHeadsArgs) -> tuple[Array, Array]:
    """Return q and k after their norms, if there are any, and their rotation."""
    q, k = args.q, args.k
    if args.scales is not None:
        q, k = rms_norm(q, args.scales[0], args.eps), rms_norm(k, args.scales[1], args.eps)
    q, k = (rotate(jnp.asarray(a), args.cos, args.sin) for a in (q, k))
    return q, k
