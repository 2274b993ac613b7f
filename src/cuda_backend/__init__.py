"""What NVIDIA GPUs have of their own, found by lora_jax through entry points and loaded late."""

from collections.abc import Callable

from lora_jax.memory.virtual import AbstractVirtualMemory


def kernels() -> dict[str, Callable]:
    """Return the ops that this backend has, by name; what the entry point `cuda` leads to."""
    from cuda_backend.grouped_matmul import grouped_matmul
    from cuda_backend.lora_gemm import lora_gemm
    from cuda_backend.merge import merge
    from cuda_backend.paged_attention import paged_attention
    from cuda_backend.reroute import reroute, row_map

    ops = (grouped_matmul, lora_gemm, merge, paged_attention, reroute, row_map)
    return {op.__name__: op for op in ops}


def virtual_memory(device: int = 0) -> AbstractVirtualMemory:
    """Return the memory of one GPU, or raise NotImplementedError where there is none."""
    from cuda_backend.vmm import CudaDriver
    from lora_jax.memory.driver import DriverMemory

    return DriverMemory(CudaDriver(device))
