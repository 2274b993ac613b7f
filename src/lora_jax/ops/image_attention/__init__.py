"""Attention between the patches of one image, all to all: softmax(scale q k^T) v.

`turned_attention` turns q and k by their patches' angles before: rotary positions.
"""

from collections.abc import Callable

import jax.numpy as jnp

from lora_jax.ops import checks
from lora_jax.ops.dispatch import ANY, CPU, GPU, Implementation, Op, backend_kernel, lazy_kernel
from lora_jax.ops.image_attention import cpu, reference, xla
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
        Implementation("ffi", CPU, cpu.attend),
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
    images: int,
) -> Float[Array, "patches heads dim"]:
    q, k, v = qkv.transpose(1, 0, 2, 3)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    if images == 1:
        return image_attention(q, k, v, valid, num_patches, scale, leading=leading)
    size, outs = q.shape[0] // images, []
    for n in range(images):
        part = slice(n * size, (n + 1) * size)
        count = jnp.clip(num_patches - n * size, 0, size)
        outs.append(image_attention(q[part], k[part], v[part], valid[part], count, scale))
    return jnp.concatenate(outs)


def _one_image(kernel: Callable) -> Callable:
    """Return a kernel without the number of images, which the op has asked for before."""
    return lambda *args: kernel(*args[:-1])


def _leading_of_one(*args: object) -> str | None:
    return _leading(*args[:-1]) if args[-1] == 1 else "takes one image, not several"


CUDA_TURNED = _one_image(backend_kernel("cuda", "turned_attention"))
TURNED_ATTENTION = Op(
    "turned_attention",
    (
        Implementation("cuda", GPU, CUDA_TURNED, (_leading_of_one,)),
        Implementation("ffi", CPU, cpu.turned),
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
    images: int = 1,
    implementation: str | None = None,
) -> Float[Array, "patches heads dim"]:
    """Return `image_attention` of q and k turned by angles, as ops.rotary turns halves, and of v.

    With `images` the patches are those of so many images, each with its padding, one after the
    other: a patch sees those of its own image, and has the bits that it has alone.

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
    if images < 1 or patches % images:
        raise ValueError(f"turned_attention: {patches} patches are no {images} images of one size")
    args = (qkv, cos, sin, valid, num_patches, scale, leading, images)
    return TURNED_ATTENTION.call(implementation, *args)
