"""Compiles the CUDA kernels at first use, keeps them in the user's cache and gives them to XLA."""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import time
from pathlib import Path

import jax
import jaxlib.version

from lora_jax.ops import dispatch
from lora_jax.ops.cpu.build import BuildError, locked

log = logging.getLogger(__name__)

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
    "lora_jax_cuda_row_items",
    "lora_jax_cuda_lora_gemm",
    "lora_jax_cuda_lora_shrink",
    "lora_jax_cuda_lora_expand",
    "lora_jax_cuda_merge",
    "lora_jax_cuda_attention_units",
    "lora_jax_cuda_paged_attention",
    "lora_jax_cuda_row_map",
    "lora_jax_cuda_reroute",
)


def find_compiler() -> str | None:
    """Return the path of nvcc, or None; the toolkit's usual place counts as well as the path."""
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def sources() -> list[Path]:
    """Return the kernels' files in a fixed order."""
    return sorted((Path(__file__).parent / "csrc").glob("*.cu*"))


def command(compiler: str, library: Path, *more: str) -> list[str]:
    """Return the command that compiles all kernels into `library`."""
    units = [str(p) for p in sources() if p.suffix == ".cu"]
    return [compiler, *FLAGS, *more, f"-I{jax.ffi.include_dir()}", *units, "-o", str(library)]


def cache_key(compiler: str) -> str:
    """Return a digest of everything that the compiled library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256()
    parts = [p.encode() for p in (jax.__version__, jaxlib.version.__version__, *FLAGS)]
    for part in (*parts, version, *(p.read_bytes() for p in sources())):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def build(folder: Path) -> Path:
    """Return the compiled library in `folder`, compiling it if it is not there yet.

    Raises:
        BuildError: there is no nvcc, it fails, or the folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no nvcc on the path")
    library = folder / f"cuda-{cache_key(compiler)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile(compiler, library)
    except OSError as error:
        raise BuildError(f"cannot write the kernel cache: {error}") from error
    return library


def _compile(compiler: str, library: Path) -> None:
    """Compile into a temporary name and rename, so that nobody loads half a library."""
    log.info("compiling the CUDA kernels, once for this machine")
    start = time.perf_counter()
    part = library.with_suffix(f".{os.getpid()}.part")
    result = subprocess.run(command(compiler, part), capture_output=True, text=True, check=False)
    if result.returncode:
        part.unlink(missing_ok=True)
        raise BuildError(f"nvcc failed: {(result.stderr or result.stdout).strip()[:2000]}")
    part.replace(library)
    log.info("compiled the CUDA kernels in %.1f s: %s", time.perf_counter() - start, library)


@functools.cache
def available() -> bool:
    """Return whether the kernels are registered with XLA, building them at the first call.

    Failure is logged once as a warning; the ops then run as portable JAX.
    """
    try:
        library = ctypes.CDLL(str(build(dispatch.cache_folder())))
        handlers = {name: jax.ffi.pycapsule(getattr(library, name)) for name in TARGETS}
    except (BuildError, OSError, AttributeError) as error:
        log.warning("CUDA kernels are off, ops run as plain JAX (slower): %s", error)
        return False
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return True


def require() -> None:
    """Raise NotImplementedError unless there is a Hopper GPU and the kernels are there."""
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"CUDA kernels cannot run on {jax.default_backend()}")
    capability = getattr(jax.devices()[0], "compute_capability", "unknown")
    if capability != "9.0":
        raise NotImplementedError(f"CUDA kernels are built for capability 9.0, not {capability}")
    if not available():
        raise NotImplementedError("the CUDA kernels could not be built")
