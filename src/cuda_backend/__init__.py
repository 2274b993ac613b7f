"""What NVIDIA GPUs have of their own, found by lora_jax through entry points and loaded late."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from lora_jax.memory.virtual import AbstractVirtualMemory

if TYPE_CHECKING:
    from cuda_backend.peer import PeerDevice


def kernels() -> dict[str, Callable]:
    """Return the ops that this backend has, by name; what the entry point `cuda` leads to.

    Only kernels whose GPU tests have passed on a GPU: merge, paged_attention, reroute and row_map
    are compiled and checked for spills, but not yet run, so nothing chooses them by itself.
    """
    from cuda_backend.lora_gemm import lora_gemm

    return {"lora_gemm": lora_gemm}


def transport(device: int = 0) -> "PeerDevice":
    """Return one GPU as an end of a transport, or raise NotImplementedError where there is none."""
    from cuda_backend.peer import PeerDevice

    return PeerDevice(device)


def virtual_memory(device: int = 0) -> AbstractVirtualMemory:
    """Return the memory of one GPU, or raise NotImplementedError where there is none."""
    from cuda_backend.vmm import CudaDriver
    from lora_jax.memory.driver import DriverMemory

    return DriverMemory(CudaDriver(device))
