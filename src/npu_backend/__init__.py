"""Ascend backend: memory and ops, loaded by entry point.

Never run on an Ascend device: checked against a host library of the same symbols, a double of
torch_npu's and vllm-ascend's operators, and Triton's interpreters. `grouped_matmul`, `lora` and
`reroute` take torch tensors: jax has no Ascend devices, so dispatch cannot reach them and nothing
is offered to it. They are for a process of torch_npu, which serving does not have yet.
"""

from lora_jax.memory.virtual import AbstractVirtualMemory


def virtual_memory(device: int = 0) -> AbstractVirtualMemory:
    """Return the memory of one NPU, or raise NotImplementedError where there is none."""
    from lora_jax.memory.driver import DriverMemory
    from npu_backend.vmm import AscendDriver

    return DriverMemory(AscendDriver(device))
