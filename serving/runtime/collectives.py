"""Bounds on NCCL, by which the devices of a split model may exchange results.

XLA lets a collective wait for ever. A lost device would so hold up the others with no error.
"""

import os
from collections.abc import MutableMapping

from jax._src import xla_bridge  # nothing public says whether jax is at work

_FLAGS, _MULTICAST = "XLA_FLAGS", "NCCL_NVLS_ENABLE"
_TIMEOUT = "xla_gpu_nccl_termination_timeout_seconds"
TIMEOUT_S = 60  # longer than members of an instance wait for each other


def bound_collectives(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let a collective that waits TIMEOUT_S seconds end its process, and use no NVLink multicast.

    What the user has set stays. jax reads the flags when it looks for devices: where it has,
    nothing is changed.
    """
    if xla_bridge.backends_are_initialized():
        return
    flags = environ.get(_FLAGS, "")
    if _TIMEOUT not in flags:
        environ[_FLAGS] = f"{flags} --{_TIMEOUT}={TIMEOUT_S}".strip()
    environ.setdefault(_MULTICAST, "0")
