"""What Ascend NPUs have of their own, found by lora_jax through entry points and loaded late.

Never run on an Ascend device: checked against a host library of the same symbols.
"""

from lora_jax.memory.virtual import AbstractVirtualMemory


def virtual_memory(device: int = 0) -> AbstractVirtualMemory:
    """Return the memory of one NPU, or raise NotImplementedError where there is none."""
    from lora_jax.memory.driver import DriverMemory
    from npu_backend.vmm import AscendDriver

    return DriverMemory(AscendDriver(device))
