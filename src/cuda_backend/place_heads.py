"""Heads to their pages, by csrc/place_heads: norm, rotation and writes at once."""

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from cuda_backend.rms_norm import check_norm
from lora_jax.ops.acting_call import acting_call
from lora_jax.ops.dispatch import Declined
from lora_jax.ops.place_heads import PlaceHeadsArgs
from lora_jax.typing import Array

HEAD_DIMS = (64, 128, 256)


def check_heads(dtype: jnp.dtype, page_dtype: jnp.dtype, head_dim: int) -> None:
    """Raise Declined, saying why, for heads that the kernel does not serve."""
    if dtype != jnp.bfloat16 or page_dtype != jnp.bfloat16:
        raise Declined(f"cuda place_heads takes bfloat16, not {dtype}, {page_dtype}")
    if head_dim not in HEAD_DIMS:
        raise Declined(f"cuda place_heads takes heads of {HEAD_DIMS}, not {head_dim}")


def place_heads(args: PlaceHeadsArgs) -> tuple[Array, Array, Array]:
    """Return what lora_jax.ops.place_heads does, the pages written in place."""
    q, k_pages, v_pages = args.q, args.k_pages, args.v_pages
    check_heads(q.dtype, k_pages.dtype, q.shape[2])
    for scale in args.scales or ():
        check_norm(scale.dtype, q.shape[2])
    ffi.require()
    none = jnp.zeros((0,), q.dtype)
    scales = (none, none) if args.scales is None else args.scales
    pages = args.token_to_page_slot, k_pages, v_pages
    operands = (q, args.k, args.v, args.cos, args.sin, *scales, *pages)
    options = {"eps": np.float32(args.eps)}
    if args.in_place:
        out = jax.ShapeDtypeStruct(q.shape, q.dtype)
        call = acting_call("lora_jax_cuda_place_heads_in_place", out)
        return call(*operands, **options), k_pages, v_pages
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k_pages, v_pages)]
    call = jax.ffi.ffi_call("lora_jax_cuda_place_heads", shapes, input_output_aliases={8: 1, 9: 2})
    turned, k_pages, v_pages = call(*operands, **options)
    return turned, k_pages, v_pages
