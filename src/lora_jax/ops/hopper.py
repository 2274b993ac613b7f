"""Requirements of the Mosaic GPU kernels on the machine: a Hopper GPU."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from lora_jax.ops.dispatch import Declined
from lora_jax.typing import Array, Int

if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    Interpret = plgpu.InterpretGPUParams | bool | None
else:
    # Kernels import Mosaic, which takes 0.3 s. Backends ask here for the sizes of a GPU alone, also
    # in the process that functions are forked from, and a start waits for that.
    Interpret = Any

CAPABILITY = "9.0"
NUM_SMS = 132  # of an H100 SXM and an H200: what is assumed where no GPU is at hand
SHARED_BYTES = 227 << 10  # that the CTAs of one SM may share, a reserved KiB each included
COLUMNS = 64  # bfloat16 in a row of 128 bytes, which is how shared memory is swizzled for wgmma


def require(op: str, dtype: jnp.dtype, interpret: Interpret) -> None:
    """Raise Declined unless the kernel can run: bfloat16, on a Hopper GPU.

    `interpret` parameters run it on any device; False only compiles it, for the target at hand.
    """
    if dtype != jnp.bfloat16:
        raise Declined(f"{op} on Mosaic GPU takes bfloat16, not {dtype}")
    require_device(op, interpret)


def require_device(op: str, interpret: Interpret) -> None:
    """Raise Declined unless there is a Hopper GPU, or none is needed."""
    if interpret is not None:
        return
    if jax.default_backend() != "gpu":
        raise Declined(f"{op} on Mosaic GPU cannot run on {jax.default_backend()}")
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != CAPABILITY:
        raise Declined(
            f"{op} on Mosaic GPU is written for capability {CAPABILITY}, not {capability}"
        )


def num_sms(interpret: Interpret) -> int:
    """Return how many SMs a persistent kernel fills; one in the interpreter, which is slow."""
    if interpret:
        return 1
    return getattr(jax.devices()[0], "core_count", None) or NUM_SMS


def at_own_width(
    do: Callable[[int], None],
    total: int,
    columns: int,
    sides: int,
    tile: Int[Array, ""],
    side: Int[Array, ""],
) -> None:
    """Call, in a kernel, do(columns of this tile and side that lie within `total`), if any do.

    Tiles are `sides` times `columns` wide. A copied row is one run of bytes: unlike a block of
    rows it is not cut where the array ends, but goes on into the next row.
    """
    wide = columns * sides
    last = (total - 1) // wide
    left = [min(columns, max(0, total - last * wide - s * columns)) for s in range(sides)]
    if all(width == columns for width in left):
        do(columns)
        return
    pl.when(tile < last)(lambda: do(columns))
    for s, width in enumerate(left):
        if width:
            pl.when((tile == last) & (side == s))(lambda width=width: do(width))
