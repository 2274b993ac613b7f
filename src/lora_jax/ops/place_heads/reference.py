"""Norm, rotation and page writes of heads, in plain jnp: the meaning of the op."""

import jax.numpy as jnp

from lora_jax.ops.kv_rows import CODED, coded
from lora_jax.ops.place_heads.args import PlaceHeadsArgs
from lora_jax.typing import Array, Float


def place_heads(args: PlaceHeadsArgs) -> tuple[Array, Array, Array]:
    """Return rotated(q), and the pages with rotated(k) and v at flat slot token_to_page_slot[t].

    rotated(x)[t] rotates pair (i, i + dim / 2) of each normed head by angle i of token t.
    """
    q, k = args.q, args.k
    if args.scales is not None:
        q, k = _normed(q, args.scales[0], args.eps), _normed(k, args.scales[1], args.eps)
    q, k = _rotated(q, args.cos, args.sin), _rotated(k, args.cos, args.sin)
    places = args.token_to_page_slot
    return q, _written(args.k_pages, k, places), _written(args.v_pages, args.v, places)


def _normed(
    x: Float[Array, "tokens heads head_dim"], weight: Float[Array, "head_dim"], eps: float
) -> Float[Array, "tokens heads head_dim"]:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    scale = weight.astype(jnp.float32)[None, None]
    return (wide / jnp.sqrt(mean_square + jnp.float32(eps)) * scale).astype(x.dtype)


def _rotated(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
) -> Float[Array, "tokens heads head_dim"]:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _written(pages: Array, new: Array, places: Array) -> Array:
    new = coded(new) if pages.dtype == CODED else new
    flat = pages.reshape(-1, *pages.shape[2:])
    return flat.at[places].set(new, mode="drop").reshape(pages.shape)
