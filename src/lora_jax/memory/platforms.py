"""The virtual memory of a platform: the host's, or a backend's found by its entry point."""

import importlib.metadata

from lora_jax.memory.host import HostMemory
from lora_jax.memory.virtual import AbstractVirtualMemory

GROUP = "lora_jax.memory"  # entry points: a function of the device's number
_BACKENDS = {"gpu": "cuda", "cuda": "cuda", "npu": "npu"}


def for_platform(platform: str, device: int = 0) -> AbstractVirtualMemory:
    """Return the memory of one device of a platform, as jax.default_backend() names it.

    A backend's code is imported only here, so only where its platform is asked for.

    Raises:
        NotImplementedError: no memory is known or installed for the platform, or it cannot run.
    """
    if platform == "cpu":
        return HostMemory(device=device)
    name = _BACKENDS.get(platform)
    for entry in importlib.metadata.entry_points(group=GROUP, name=name) if name else ():
        return entry.load()(device)
    raise NotImplementedError(f"no virtual memory for platform {platform!r} is installed")
