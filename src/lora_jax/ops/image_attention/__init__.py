"""Attention between the patches of one image, all to all: softmax(scale q k^T) v.

`turned_attention` turns q and k by their patches' angles before: rotary positions.
"""

import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.dispatch import ANY, GPU, Implementation, Op, backend_kernel, lazy_kernel
from lora_jax.ops.image_attention import reference, xla
from lora_jax.ops.image_attention.xla import attend_windows
from lora_jax.ops.rotary import rotate
from lora_jax.typing import Array, Bool, Float, Int

__all__ = ["attend_windows", "image_attention", "turned_attention"]


def _leading(*args: object) -> str | None:
    """Decline valid patches that do not come first: a kernel knows their number only."""
    return None if args[-1] else "the valid patches are not the first ones"


IMAGE_ATTENTION = Op(
    "image_attention",
    (
        Implementation("cudnn", GPU, lazy_kernel(f"{__name__}.cudnn", "attend"), (_leading,)),
        Implementation("xla", ANY, xla.attend, stands_in=True),
        Implementation("reference", ANY, reference.attend),
    ),
)


def image_attention(
    q: Float[Array, "patches heads dim"],
    k: Float[Array, "patches heads dim"],
    v: Float[Array, "patches heads dim"],
    valid: Bool[Array, "patches"],
    num_patches: Int[Array, ""],
    scale: float,
    *,
    leading: bool = False,
    implementation: str | None = None,
) -> Float[Array, "patches heads dim"]:
    """softmax(scale q k^T) v over the valid patches, all of which are below num_patches.

    `leading` promises that the valid patches are exactly the first num_patches. A row's bits do not
    depend on how many patches of padding come after the image, nor on what they hold. Rows of
    padding are undefined but finite where q, k and v are.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    checks.check_dtypes("image_attention", q=q, k=k, v=v)
    checks.check_shapes(
        "image_attention",
        k=(tuple(k.shape), tuple(q.shape)),
        v=(tuple(v.shape), tuple(q.shape)),
        valid=(tuple(valid.shape), q.shape[:1]),
    )
    checks.check_dtype("image_attention", jnp.int32, num_patches=num_patches)
    args = (q, k, v, valid, num_patches, scale, leading)
    return IMAGE_ATTENTION.call(implementation, *args)


def _turned(
    qkv: Float[Array, "patches 3 heads dim"],
    cos: Float[Array, "patches half"],
    sin: Float[Array, "patches half"],
    valid: Bool[Array, "patches"],
    num_patches: Int[Array, ""],
    scale: float,
    leading: bool,
) -> Float[Array, "patches heads dim"]:
    q, k, v = qkv.transpose(1, 0, 2, 3)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return image_attention(q, k, v, valid, num_patches, scale, leading=leading)


TURNED_ATTENTION = Op(
    "turned_attention",
    (
        Implementation("cuda", GPU, backend_kernel("cuda", "turned_attention"), (_leading,)),
        Implementation("xla", ANY, _turned, stands_in=True),
    ),
)


def turned_attention(
    qkv: Float[Array, "patches 3 heads dim"],
    cos: Float[Array, "patches half"],
    sin: Float[Array, "patches half"],
    valid: Bool[Array, "patches"],
    num_patches: Int[Array, ""],
    scale: float,
    *,
    leading: bool = False,
    implementation: str | None = None,
) -> Float[Array, "patches heads dim"]:
    """Return `image_attention` of q and k turned by angles, as ops.rotary turns halves, and of v.

    Raises:
        ValueError: shapes or dtypes do not fit each other.
    """
    if qkv.ndim != 4 or qkv.shape[1] != 3 or qkv.shape[3] % 2:
        wanted = "[patches, 3, heads, an even number]"
        raise ValueError(f"turned_attention: qkv has shape {qkv.shape}, expected {wanted}")
    patches, *_, dim = qkv.shape
    angles = (patches, dim // 2)
    checks.check_dtypes("turned_attention", qkv=qkv)
    checks.check_dtype("turned_attention", jnp.float32, cos=cos, sin=sin)
    checks.check_shapes(
        "turned_attention",
        cos=(tuple(cos.shape), angles),
        sin=(tuple(sin.shape), angles),
        valid=(tuple(valid.shape), (patches,)),
    )
    checks.check_dtype("turned_attention", jnp.int32, num_patches=num_patches)
    args = (qkv, cos, sin, valid, num_patches, scale, leading)
    return TURNED_ATTENTION.call(implementation, *args)
