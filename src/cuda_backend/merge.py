"""Merges adapters into weights by the Hopper kernel of csrc/merge/merge.cuh."""

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int

MAX_RANK = 128
COLUMNS = 64  # d_in is worked through in pieces of so many columns
ROWS = 8  # of w; the copy engine steps through B's part of them in pieces of 16 bytes


def check_support(dtype: jnp.dtype, d_out: int, d_in: int, max_rank: int) -> None:
    """Raise Declined, saying why, for what the kernel does not serve."""
    if dtype != jnp.bfloat16:
        raise Declined(f"cuda merge takes bfloat16, not {dtype}")
    if d_in % COLUMNS:
        raise Declined(f"cuda merge takes d_in in steps of {COLUMNS}, not {d_in}")
    if d_out % ROWS:
        raise Declined(f"cuda merge takes d_out in steps of {ROWS}, not {d_out}")
    if not 1 <= max_rank <= MAX_RANK:
        raise Declined(f"cuda merge takes ranks to {MAX_RANK}, not {max_rank}")


def merge(
    w: Float[Array, "matrices d_out d_in"],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    sites: Int[Array, "matrices 3"],
    scaling: Float[Array, "matrices"],
    max_rank: int,
    *,
    in_place: bool = True,
) -> Float[Array, "matrices d_out d_in"]:
    """w[m] + scaling[m] * B^T A, as lora_jax.ops.merge says; products of bfloat16, sums in f32."""
    check_support(w.dtype, w.shape[1], w.shape[2], max_rank)
    ffi.require()
    out = jax.ShapeDtypeStruct(w.shape, w.dtype)
    aliases = {0: 0} if in_place else {}
    call = jax.ffi.ffi_call("lora_jax_cuda_merge", out, input_output_aliases=aliases)
    return call(w, a_pool, b_pool, sites, scaling, max_rank=np.int64(max_rank))


def merge_apart(
    maps: tuple[Float[Array, "d_out d_in"], ...],
    a_pool: Float[Array, "a_rows d_in"],
    b_pool: Float[Array, "b_rows d_out"],
    sites: Int[Array, "matrices 3"],
    scaling: Float[Array, "matrices"],
    max_rank: int,
) -> tuple[Float[Array, "d_out d_in"], ...]:
    """Return `merge` of each map in arrays of their own, in few launches; same bits."""
    d_out, d_in = maps[0].shape
    check_support(maps[0].dtype, d_out, d_in, max_rank)
    ffi.require()
    outs = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in maps]
    call = jax.ffi.ffi_call("lora_jax_cuda_merge_apart", outs)
    return tuple(call(a_pool, b_pool, sites, scaling, *maps, max_rank=np.int64(max_rank)))
