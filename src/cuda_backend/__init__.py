"""Kernels for NVIDIA Hopper, in CUDA C++, that lora_jax finds by its entry point and loads late."""

from collections.abc import Callable


def kernels() -> dict[str, Callable]:
    """Return the ops that this backend has, by name; what the entry point `cuda` leads to."""
    from cuda_backend.lora_gemm import lora_gemm
    from cuda_backend.merge import merge

    return {"lora_gemm": lora_gemm, "merge": merge}
