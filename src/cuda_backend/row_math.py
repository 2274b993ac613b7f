"""Row-wise CUDA ops for Hopper: norms, choice of experts, and heads with their pages.

XLA makes three to seven launches of each, as a sum in the middle has to keep one order.
"""

import jax
import jax.numpy as jnp
import numpy as np

from cuda_backend import ffi
from lora_jax.config import MoeConfig
from lora_jax.typing import Array, Float, Int

VECTOR = 8  # values that are read at once
WIDEST_NORM = 8192
MOST_EXPERTS, MOST_CHOSEN = 512, 32
HEAD_DIMS = (64, 128, 256)


def check_norm(dtype: jnp.dtype, size: int) -> None:
    """Raise NotImplementedError, saying why, for rows that the norm does not serve."""
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"cuda rms_norm takes bfloat16, not {dtype}")
    if size % VECTOR or not 0 < size <= WIDEST_NORM:
        raise NotImplementedError(
            f"cuda rms_norm takes rows in steps of {VECTOR} up to {WIDEST_NORM}, not {size}"
        )


def rms_norm(
    x: Float[Array, "rows size"],
    addend: Float[Array, "rows size"] | None,
    weight: Float[Array, "size"],
    eps: float,
) -> tuple[Float[Array, "rows size"], Float[Array, "rows size"]]:
    """Return x + addend, or x, and its norm; see lora_jax.nn.row_math.add_rms_norm."""
    for array in (x, weight):
        check_norm(array.dtype, x.shape[1])
    ffi.require()
    none, whole = jnp.zeros((0,), x.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype)
    shapes = (jax.ShapeDtypeStruct((0,), x.dtype) if addend is None else whole, whole)
    call = jax.ffi.ffi_call("lora_jax_cuda_rms_norm", shapes)
    total, normed = call(x, none if addend is None else addend, weight, eps=np.float32(eps))
    return (x if addend is None else total), normed


def check_choice(moe: MoeConfig) -> None:
    """Raise NotImplementedError, saying why, for a choice that the kernel does not make."""
    op, experts, k = "cuda choose_experts takes", moe.num_experts, moe.top_k
    if experts > MOST_EXPERTS or k > min(experts, MOST_CHOSEN):
        raise NotImplementedError(
            f"{op} {MOST_CHOSEN} of {MOST_EXPERTS} at most, not {k}, {experts}"
        )
    if moe.topk_norm not in (None, 1) or moe.num_groups > 1:
        wrong = f"norm {moe.topk_norm}, {moe.num_groups} groups"
        raise NotImplementedError(f"{op} no norm or 1, one group of experts, not {wrong}")


def choose_experts(
    logits: Float[Array, "tokens experts"], moe: MoeConfig
) -> tuple[Float[Array, "tokens k"], Int[Array, "tokens k"]]:
    """Return what lora_jax.nn.moe.choose_experts does; no derivative."""
    check_choice(moe)
    ffi.require()
    shape = (logits.shape[0], moe.top_k)
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)]
    call = jax.ffi.ffi_call("lora_jax_cuda_choose_experts", shapes)
    options = {"softmax_first": moe.softmax_first, "normed": moe.topk_norm is not None}
    weights, ids = call(logits, **options, scale=np.float32(moe.weight_scale))
    return weights, ids


def check_heads(dtype: jnp.dtype, page_dtype: jnp.dtype, head_dim: int) -> None:
    """Raise NotImplementedError, saying why, for heads that the kernel does not serve."""
    if dtype != jnp.bfloat16 or page_dtype != jnp.bfloat16:
        raise NotImplementedError(f"cuda place_heads takes bfloat16, not {dtype}, {page_dtype}")
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"cuda place_heads takes heads of {HEAD_DIMS}, not {head_dim}")


def place_heads(
    q: Float[Array, "tokens q_heads head_dim"],
    k: Float[Array, "tokens kv_heads head_dim"],
    v: Float[Array, "tokens kv_heads head_dim"],
    cos: Float[Array, "tokens half"],
    sin: Float[Array, "tokens half"],
    scales: tuple[Float[Array, "head_dim"], Float[Array, "head_dim"]] | None,
    eps: float,
    k_pages: Float[Array, "pages page_size kv_heads head_dim"],
    v_pages: Float[Array, "pages page_size kv_heads head_dim"],
    token_to_page_slot: Int[Array, "tokens"],
) -> tuple[Array, Array, Array]:
    """Return what lora_jax.nn.attention.place_heads does, the pages written in place."""
    check_heads(q.dtype, k_pages.dtype, q.shape[2])
    for scale in scales or ():
        check_norm(scale.dtype, q.shape[2])
    ffi.require()
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k_pages, v_pages)]
    call = jax.ffi.ffi_call("lora_jax_cuda_place_heads", shapes, input_output_aliases={8: 1, 9: 2})
    none = jnp.zeros((0,), q.dtype)
    q_scale, k_scale = (none, none) if scales is None else scales
    angles = cos, sin, q_scale, k_scale
    pages = token_to_page_slot, k_pages, v_pages
    turned, k_pages, v_pages = call(q, k, v, *angles, *pages, eps=np.float32(eps))
    return turned, k_pages, v_pages
