"""Attention between the patches of one image, all to all or inside windows, in portable JAX.

Blocks have a fixed size and only those that hold patches are computed: the bits of an image do not
depend on the bucket it is computed in. On a GPU 8,160 patches of 27 layers take 27,648 turns of a
loop of small kernels.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lora_jax.typing import Array, Bool, Float, Int

BLOCK = 256  # patches
_LOWEST = -1e30  # finite: a row without any key must not become NaN


def attend(
    q: Float[Array, "patches heads dim"],
    k: Float[Array, "patches heads dim"],
    v: Float[Array, "patches heads dim"],
    valid: Bool[Array, "patches"],
    num_patches: Int[Array, ""],
    scale: float,
    leading: bool,
) -> Float[Array, "patches heads dim"]:
    """softmax(scale q k^T) v over the valid patches, all of which are below num_patches.

    Sums are float32, in blocks of keys one after the other; rows of later blocks are 0.
    """
    del leading
    size = q.shape[0]
    block = min(BLOCK, size)
    padding = -size % block
    if padding:
        q, k, v = (jnp.pad(a, ((0, padding), (0, 0), (0, 0))) for a in (q, k, v))
        valid = jnp.pad(valid, (0, padding))
    count = (num_patches + (block - 1)) // block

    def of_queries(number: Array, out: Array) -> Array:
        queries = lax.dynamic_slice_in_dim(q, number * block, block)
        done = _over_keys(queries, k, v, valid, count, block, scale)
        return lax.dynamic_update_slice_in_dim(out, done, number * block, 0)

    return lax.fori_loop(0, count, of_queries, jnp.zeros_like(q))[:size]


def _over_keys(
    q: Float[Array, "block heads dim"],
    k: Float[Array, "patches heads dim"],
    v: Float[Array, "patches heads dim"],
    valid: Bool[Array, "patches"],
    count: Int[Array, ""],
    block: int,
    scale: float,
) -> Float[Array, "block heads dim"]:
    """Return one block of queries' result: the maximum and the sums grow block by block."""
    heads, dim = q.shape[1:]

    def of_keys(number: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        most, total, mixed = state
        keys, values, real = (
            lax.dynamic_slice_in_dim(a, number * block, block) for a in (k, v, valid)
        )
        scores = _scores("qhd,khd->hqk", q, keys, scale)
        scores = jnp.where(real[None, None], scores, _LOWEST)
        top = jnp.maximum(most, jnp.max(scores, axis=-1))
        weights = jnp.where(real[None, None], jnp.exp(scores - top[..., None]), 0.0)
        shrink = jnp.exp(most - top)
        part = product("hqk,khd->hqd", weights.astype(v.dtype), values)
        total = total * shrink + jnp.sum(weights, axis=-1)
        return top, total, mixed * shrink[..., None] + part

    start = (
        jnp.full((heads, block), _LOWEST, jnp.float32),
        jnp.zeros((heads, block), jnp.float32),
        jnp.zeros((heads, block, dim), jnp.float32),
    )
    _, total, mixed = lax.fori_loop(0, count, of_keys, start)
    return (mixed / total[..., None]).transpose(1, 0, 2).astype(q.dtype)


def attend_windows(
    q: Float[Array, "patches heads dim"],
    k: Float[Array, "patches heads dim"],
    v: Float[Array, "patches heads dim"],
    valid: Bool[Array, "patches"],
    window: int,
    scale: float,
) -> Float[Array, "patches heads dim"]:
    """softmax(scale q k^T) v inside each run of `window` patches; padding gives finite numbers."""
    shape = (-1, window, *q.shape[1:])
    queries, keys, values = (a.reshape(shape) for a in (q, k, v))
    real = valid.reshape(-1, 1, 1, window)
    scores = jnp.where(real, _scores("wqhd,wkhd->whqk", queries, keys, scale), _LOWEST)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return product("whqk,wkhd->wqhd", weights, values).reshape(q.shape).astype(q.dtype)


def _scores(
    spec: str, q: Float[Array, "*queries"], k: Float[Array, "*keys"], scale: float
) -> Float[Array, "*scores"]:
    return product(spec, q, k) * jnp.float32(scale)


def product(
    spec: str, x: Float[Array, "*left"], y: Float[Array, "*right"]
) -> Float[Array, "*product"]:
    """Return the product in float32; of float32 factors it is not computed in fewer bits."""
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, y, precision=exact, preferred_element_type=jnp.float32)
