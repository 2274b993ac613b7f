"""The C++ kernels: compiled beforehand or at first use, kept in the user's cache, given to XLA.

`python -m lora_jax.ops.cpu.build` compiles them into the cache before their first use.
"""

import ctypes
import dataclasses
import functools
import logging
import sys
from pathlib import Path

import jax

from lora_jax import own_files
from lora_jax.ops import dispatch, native
from lora_jax.ops.cpu import prebuilt
from lora_jax.ops.dispatch import Declined

log = logging.getLogger(__name__)

TARGETS = (
    "lora_jax_gemm_float32",
    "lora_jax_gemm_bfloat16",
    "lora_jax_rms_norm_float32",
    "lora_jax_rms_norm_bfloat16",
    "lora_jax_layer_norm_float32",
    "lora_jax_layer_norm_bfloat16",
    "lora_jax_image_attention_float32",
    "lora_jax_image_attention_bfloat16",
    "lora_jax_silu_times_float32",
    "lora_jax_silu_times_bfloat16",
    "lora_jax_place_heads_float32",
    "lora_jax_place_heads_bfloat16",
    "lora_jax_lora_float32",
    "lora_jax_lora_bfloat16",
    "lora_jax_lora_bfloat16_to_float32",
    "lora_jax_lora_int8_float32",
    "lora_jax_lora_int8_bfloat16",
    "lora_jax_lora_int8_bfloat16_to_float32",
    "lora_jax_attention_float32",
    "lora_jax_attention_bfloat16",
    "lora_jax_attention_8_bits_float32",
    "lora_jax_attention_8_bits_bfloat16",
    "lora_jax_write_pages",
    "lora_jax_row_map",
    "lora_jax_reroute",
    "lora_jax_read_board",
)


def library() -> native.Library:
    """Return the kernels as sources of one library."""
    kernels = native.cpp_library("kernels", "CPU kernels", Path(__file__).parent, TARGETS)
    return dataclasses.replace(kernels, ready=_ready())


def _ready() -> Path | None:
    """Return the prebuilt kernels for this machine; None where none are there, or they fail."""
    file = prebuilt.find()
    if file is not None:
        if not own_files.is_unchanged(file):  # reading a file that was cut would end the process
            log.warning(
                "The prebuilt CPU kernels %s are damaged, or lack their .sha256 file: they are "
                "compiled instead. Install the wheel again.",
                file,
            )
            return None
        try:
            ctypes.CDLL(str(file))
        except OSError as error:  # of a newer Linux, say; a compiler may be there
            log.warning("The prebuilt CPU kernels cannot be loaded: %s", error)
            return None
    return file


@functools.cache
def available() -> bool:
    """Return whether the kernels are registered with XLA, building them at the first call.

    Failure is logged once as a warning; the ops then run as portable JAX.
    """
    advice = ", or install a wheel that brings the kernels (`make wheel` on another machine)"
    return library().load_or_warn(dispatch.cache_folder(), log, advice)


@functools.cache
def loaded() -> ctypes.CDLL:
    """Return the kernels' library, for calls without XLA.

    It is found once: a forked process in a jail runs no compiler, nor asks one for its version.
    Raises native.BuildError where the kernels cannot be built.
    """
    return ctypes.CDLL(str(library().build(dispatch.cache_folder())))


@functools.cache
def reads_quads() -> bool:
    """Return whether the kernels are there and read 4-bit codes fastest in the order of quads."""
    return available() and bool(loaded().lora_jax_reads_quads())


@functools.cache
def rows_address() -> int:
    """Return the address of lora_jax_lora_rows (adapters.cc), for callers without XLA.

    Raises native.BuildError where the kernels cannot be built.
    """
    address = ctypes.cast(loaded().lora_jax_lora_rows, ctypes.c_void_p).value
    assert address is not None, "a function at no address"
    return address


def require() -> None:
    """Raise Declined unless the kernels are there and the platform is a CPU."""
    if jax.default_backend() != "cpu":
        raise Declined(f"CPU kernels cannot run on {jax.default_backend()}")
    if not available():
        raise Declined(f"the CPU {dispatch.NOT_BUILT}")


def main() -> None:
    """Compile the kernels for this machine into the cache, unless they are there."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        library().build(dispatch.cache_folder())
    except native.BuildError as error:
        sys.exit(f"The CPU kernels were not compiled: {error}")


if __name__ == "__main__":
    main()
