"""A GPU's kernels are made ready while weights are loaded.

The first start of a machine compiles them, which takes nvcc most of a minute; it then waits for the
longer of both.
"""

import contextlib
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax

from lora_jax.ops import dispatch

logger = logging.getLogger(__name__)

_CAPABILITY = "9.0"  # of the GPUs that have kernels


@contextlib.contextmanager
def kernels_beside() -> Iterator[None]:
    """Compile or read a GPU's kernels in another thread; wait for them at the end.

    What fails here fails again, and says so, when a step asks for its kernels.
    """
    devices = jax.devices() if jax.default_backend() == "gpu" else []
    if not any(getattr(device, "compute_capability", "") == _CAPABILITY for device in devices):
        yield
        return
    with ThreadPoolExecutor(1, thread_name_prefix="kernels") as pool:
        job = pool.submit(dispatch.backend_kernel("cuda", "load_kernels"))
        yield
        if (error := job.exception()) is not None:
            logger.debug("The kernels of the GPU are not ready: %s", error)
