"""What NVIDIA GPUs have of their own, found by lora_jax through entry points and loaded late."""

from collections.abc import Callable

from lora_jax.memory.virtual import AbstractVirtualMemory


def kernels() -> dict[str, Callable]:
    """Return the ops that this backend has, by name; what the entry point `cuda` leads to.

    Only kernels whose GPU tests have passed on a GPU: paged_attention is compiled and checked for
    spills, but not yet run, so nothing chooses it by itself.
    """
    from cuda_backend.lora_gemm import lora_gemm, lora_gemms
    from cuda_backend.merge import merge
    from cuda_backend.reroute import adapter_items, reroute, row_map

    found = (lora_gemm, lora_gemms, merge, adapter_items, reroute, row_map)
    return {kernel.__name__: kernel for kernel in found}


def virtual_memory(device: int = 0) -> AbstractVirtualMemory:
    """Return the memory of one GPU, or raise NotImplementedError where there is none."""
    from cuda_backend.vmm import CudaDriver
    from lora_jax.memory.driver import DriverMemory

    return DriverMemory(CudaDriver(device))
