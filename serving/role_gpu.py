"""Which GPU a role process computes on, where several roles share a host."""

import jax


def use_gpu(number: int) -> None:
    """Let jax use one GPU of the host; call it before anything asks jax for devices.

    The driver goes on seeing all of them, so that their memory can be reached over NVLink. On a
    machine without GPUs this does nothing.
    """
    if number < 0:
        raise ValueError(f"GPUs are numbered from 0, got {number}")
    jax.config.update("jax_cuda_visible_devices", str(number))
