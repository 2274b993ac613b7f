"""Copier of adapters' rank rows into the arrays of this process's device."""

import jax

from lora_jax.adapters.row_copies import Copier
from lora_jax.memory.platforms import for_platform


def device_copier() -> Copier | None:
    """Return the memory of the device that this process computes on.

    None on a CPU, where a program writes as fast, and where the device's memory is nobody's to
    write from outside.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return None
    try:
        return for_platform(device.platform, device.local_hardware_id or 0)
    except NotImplementedError:
        return None
