"""Copiers of adapters' rank rows into the arrays of this process's device."""

import jax

from lora_jax.adapters.host_copier import HostCopier
from lora_jax.adapters.row_copies import Copier
from lora_jax.memory.platforms import for_platform


def device_copier() -> Copier | None:
    """Return the memory of the device that this process computes on.

    None on a CPU, and where the device's memory is nobody's to write from outside: programs write
    there, or `HostCopier`.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return None
    try:
        return for_platform(device.platform, device.local_hardware_id or 0)
    except NotImplementedError:
        return None


def engine_copier(*, is_pooled: bool) -> Copier | None:
    """Return what copies the rank rows of an engine on one device.

    None: programs write them, or on a CPU the memory of a page pool (`is_pooled`) does.
    """
    if jax.local_devices()[0].platform == "cpu":
        return None if is_pooled else HostCopier()
    return device_copier()
