"""What the Mosaic GPU kernels of all ops ask of the machine they are traced for: a Hopper GPU."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

Interpret = plgpu.InterpretGPUParams | bool | None

CAPABILITY = "9.0"
NUM_SMS = 132  # of an H100 SXM and an H200: what is assumed where no GPU is at hand
SHARED_BYTES = 227 << 10  # that the CTAs of one SM may share, a reserved KiB each included
COLUMNS = 64  # bfloat16 in a row of 128 bytes, which is how shared memory is swizzled for wgmma


def require(op: str, dtype: jnp.dtype, interpret: Interpret) -> None:
    """Raise NotImplementedError unless the kernel can run: bfloat16, on a Hopper GPU.

    `interpret` parameters run it on any device; False only compiles it, for the target at hand.
    """
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"{op} on Mosaic GPU takes bfloat16, not {dtype}")
    if interpret is not None:
        return
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"{op} on Mosaic GPU cannot run on {jax.default_backend()}")
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != CAPABILITY:
        raise NotImplementedError(
            f"{op} on Mosaic GPU is written for capability {CAPABILITY}, not {capability}"
        )


def num_sms(interpret: Interpret) -> int:
    """Return how many SMs a persistent kernel fills; one in the interpreter, which is slow."""
    if interpret:
        return 1
    return getattr(jax.devices()[0], "core_count", None) or NUM_SMS
