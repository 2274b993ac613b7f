"""GPU assignment of role processes that share a host."""

import os

import jax

from serving.runtime.visible_gpus import VISIBLE, first_of


def use_gpu(number: int, count: int = 1) -> None:
    """Let jax use some GPUs of the host, from this number on; call it before devices are asked for.

    They become the first of this process and jax sees no others: jax numbers its devices from 0 and
    refuses programs for a GPU of a higher number when it is the only one. The driver goes on seeing
    all GPUs, so that their memory can be reached over NVLink. Nothing changes on a machine without
    GPUs. Raises ValueError where the process was started for fewer GPUs; a host that has fewer
    leaves the process without any.
    """
    os.environ[VISIBLE] = first_of(os.environ.get(VISIBLE), number, count)
    jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(count))))
