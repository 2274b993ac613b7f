"""Compiles the CUDA kernels at first use, keeps them in the user's cache and gives them to XLA."""

import functools
import logging
from pathlib import Path

import jax

from cuda_backend import toolkit
from lora_jax.ops import dispatch, native
from lora_jax.ops.dispatch import Declined

log = logging.getLogger(__name__)

CSRC = Path(__file__).parent / "csrc"  # a folder per op; includes are relative to this one
FLAGS = (
    "-O3",
    "-std=c++17",
    "-gencode=arch=compute_90a,code=sm_90a",
    "--threads=0",  # the files side by side
    "-shared",
    "-Xcompiler=-fPIC",
    "-DNDEBUG",
    "-w",
)
TARGETS = (
    "lora_jax_cuda_all_gather",
    "lora_jax_cuda_all_to_all_owned",
    "lora_jax_cuda_few_rows",
    "lora_jax_cuda_grouped_f32",
    "lora_jax_cuda_row_items",
    "lora_jax_cuda_lora_gemm",
    "lora_jax_cuda_lora_gated",
    "lora_jax_cuda_lora_gated_tiles",
    "lora_jax_cuda_lora_int8",
    "lora_jax_cuda_lora_joined",
    "lora_jax_cuda_lora_rows",
    "lora_jax_cuda_lora_shrink",
    "lora_jax_cuda_lora_expand",
    "lora_jax_cuda_row_tiles",
    "lora_jax_cuda_merge",
    "lora_jax_cuda_merge_placed",
    "lora_jax_cuda_merge_places",
    "lora_jax_cuda_attention_units",
    "lora_jax_cuda_paged_attention",
    "lora_jax_cuda_coded_attention",
    "lora_jax_cuda_plain_attention",
    "lora_jax_cuda_turned_attention",
    "lora_jax_cuda_dense_matmul",
    "lora_jax_cuda_dense_rows",
    "lora_jax_cuda_row_map",
    "lora_jax_cuda_layer_norm",
    "lora_jax_cuda_rms_norm",
    "lora_jax_cuda_choose_experts",
    "lora_jax_cuda_keep_likely",
    "lora_jax_cuda_silu_times",
    "lora_jax_cuda_take_rows",
    "lora_jax_cuda_place_heads",
    "lora_jax_cuda_place_heads_in_place",
    "lora_jax_cuda_read_board",
    "lora_jax_cuda_peer_push",
    "lora_jax_cuda_peer_wait_add",
    "lora_jax_cuda_peer_push_aside",
    "lora_jax_cuda_peer_wait_add_aside",
    "lora_jax_cuda_peer_take",
    "lora_jax_cuda_peer_judge",
    "lora_jax_cuda_peer_answer",
)
STATEFUL = (
    "lora_jax_cuda_lora_gated",
    "lora_jax_cuda_lora_gated_tiles",
    "lora_jax_cuda_lora_gemm",
    "lora_jax_cuda_lora_joined",
    "lora_jax_cuda_lora_shrink",
    "lora_jax_cuda_lora_expand",
)


def library() -> native.Library:
    """Return the kernels as sources of one library."""
    return native.Library(
        name="cuda",
        title="CUDA kernels",
        compilers=toolkit.find_compilers(),
        wanted=toolkit.WANTED,
        flags=FLAGS,
        includes=(CSRC,),
        sources=tuple(sorted(CSRC.rglob("*.cu*"))),
        unit=".cu",
        targets=TARGETS,
        platform="CUDA",
        stateful=STATEFUL,
        state="lora_jax_cuda_call_state",
    )


@functools.cache
def available() -> bool:
    """Return whether the kernels are registered with XLA, building them at the first call.

    Failure is logged once as a warning; the ops then run as portable JAX.
    """
    return library().load_or_warn(dispatch.cache_folder(), log)


def require() -> None:
    """Raise Declined unless there is a Hopper GPU and the kernels are there."""
    if jax.default_backend() != "gpu":
        raise Declined(f"CUDA kernels cannot run on {jax.default_backend()}")
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != "9.0":
        raise Declined(f"CUDA kernels are built for capability 9.0, not {capability}")
    if not available():
        raise Declined("the CUDA kernels could not be built")
