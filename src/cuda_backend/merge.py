"""Merges adapters into weights by the Hopper kernel of csrc/merge/merge.cuh."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.ops.acting_call import acting_call
from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Float, Int, Shaped

MAX_RANK = 128
COLUMNS = 64  # d_in is worked through in pieces of so many columns
MAX_SHAPES = 8  # of maps that a launch takes
MAP_BYTES = 128  # of a tensor map
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


def merge_writer(
    maps: tuple[Array, ...], results: tuple[Array, ...], max_rank: int
) -> Callable[..., Int[Array, ""]]:
    """Return what lora_jax.ops.merge says. One table on the device holds the addresses."""
    shapes = [w.shape for w in maps]
    groups = [(shapes.count(shape), *shape) for shape in dict.fromkeys(shapes)]
    if len(groups) > MAX_SHAPES:
        raise Declined(f"cuda merge_writer takes {MAX_SHAPES} shapes of maps, not {len(groups)}")
    for _, d_out, d_in in groups:
        check_support(maps[0].dtype, d_out, d_in, max_rank)
    ffi.require()
    pairs = zip(results, maps, strict=True)
    addresses = [array.unsafe_buffer_pointer() for pair in pairs for array in pair]
    make = functools.partial(places, tuple(addresses), tuple(shapes), max_rank)
    table = jax.jit(make, out_shardings=maps[0].sharding)()
    return functools.partial(write, table, tuple(groups), max_rank)


def places(
    addresses: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], max_rank: int
) -> Shaped[Array, "bytes"]:
    """Return tensor maps, of a result and of its map in turn, on the device."""
    out = jax.ShapeDtypeStruct((MAP_BYTES * len(addresses),), jnp.uint8)
    call = jax.ffi.ffi_call("lora_jax_cuda_merge_places", out)
    sizes = np.array(shapes, np.int64).reshape(-1)
    return call(addresses=np.array(addresses, np.int64), shapes=sizes, max_rank=np.int64(max_rank))


def write(
    table: Shaped[Array, "bytes"],
    groups: tuple[tuple[int, ...], ...],
    max_rank: int,
    pools: tuple[tuple[Array, Array], ...],
    sites: Int[Array, "maps 3"],
    scaling: Float[Array, "maps"],
    token: Int[Array, ""],
) -> Int[Array, ""]:
    """Write over the results of the table and return the token; groups are of maps of one shape.

    A group is its number of maps, d_out and d_in.
    """
    out = jax.ShapeDtypeStruct((), jnp.int32)
    call = acting_call("lora_jax_cuda_merge_placed", out, input_output_aliases={3: 0})
    given = table, sites, scaling, token, *(pool for pair in pools for pool in pair)
    sizes = tuple(size for group in groups for size in group)
    return call(*given, groups=sizes, max_rank=np.int64(max_rank))
