"""NVIDIA backend: kernels, memory and transport, loaded by entry point."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from lora_jax.memory.virtual import AbstractVirtualMemory

if TYPE_CHECKING:
    from cuda_backend.nvshmem import Nvshmem
    from cuda_backend.peer import PeerDevice


def kernels() -> dict[str, Callable]:
    """Return the ops that this backend has, by name; what the entry point `cuda` leads to.

    Two are no ops: `load_kernels` gives the kernels to XLA and returns whether they are there,
    and `HostBoard` is memory of the host that programs wait for.
    """
    from cuda_backend import ffi
    from cuda_backend.all_gather import (
        all_gather,
        all_to_all,
        all_to_all_owned,
        all_to_all_rows,
        gather_group,
    )
    from cuda_backend.choose_experts import choose_experts
    from cuda_backend.dense_matmul import dense_matmul
    from cuda_backend.grouped_matmul import gated_matmul, grouped_matmul, joined_matmul
    from cuda_backend.host_board import HostBoard
    from cuda_backend.image_attention import turned_attention
    from cuda_backend.keep_likely import keep_likely
    from cuda_backend.layer_norm import layer_norm
    from cuda_backend.lora_gated import lora_silu_times
    from cuda_backend.lora_gemm import lora_gemm
    from cuda_backend.lora_joined import joined_lora
    from cuda_backend.merge import merge, merge_writer
    from cuda_backend.paged_attention import paged_attention
    from cuda_backend.place_heads import place_heads
    from cuda_backend.reroute import adapter_items, reroute, row_map
    from cuda_backend.rms_norm import rms_norm
    from cuda_backend.silu_times import silu_times
    from cuda_backend.take_rows import take_rows

    linear = (dense_matmul, gated_matmul, grouped_matmul, joined_matmul)
    adapters = (joined_lora, lora_gemm, lora_silu_times)
    exchanges = (all_gather, all_to_all, all_to_all_owned, all_to_all_rows, gather_group)
    attention = (paged_attention, turned_attention)
    merges = (merge, merge_writer)
    others = (adapter_items, reroute, row_map)
    by_row = (choose_experts, keep_likely, layer_norm, place_heads, rms_norm, silu_times, take_rows)
    ops = (*linear, *adapters, *exchanges, *attention, *merges, *others, *by_row)
    return {**{op.__name__: op for op in (*ops, HostBoard)}, "load_kernels": ffi.available}


def transport(device: int = 0) -> "PeerDevice":
    """Return one GPU as a transport's endpoint; NotImplementedError where there is none."""
    from cuda_backend.peer import PeerDevice

    return PeerDevice(device)


def transport_world() -> "Nvshmem":
    """Return NVSHMEM, which joins GPUs of several hosts; nothing of it is loaded yet."""
    from cuda_backend.nvshmem import Nvshmem

    return Nvshmem()


def virtual_memory(device: int = 0) -> AbstractVirtualMemory:
    """Return the memory of one GPU, or raise NotImplementedError where there is none."""
    from cuda_backend.vmm import CudaDriver
    from lora_jax.memory.driver import DriverMemory

    return DriverMemory(CudaDriver(device))
