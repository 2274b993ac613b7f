"""Compiles the C++ kernels at first use, keeps them in the user's cache and gives them to XLA."""

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib.version

from lora_jax.ops import dispatch

log = logging.getLogger(__name__)

COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-O3", "-std=c++17", "-march=native", "-shared", "-fPIC", "-DNDEBUG", "-w")
TARGETS = (
    "lora_jax_gemm_float32",
    "lora_jax_gemm_bfloat16",
    "lora_jax_lora_float32",
    "lora_jax_lora_bfloat16",
    "lora_jax_attention_float32",
    "lora_jax_attention_bfloat16",
    "lora_jax_row_map",
    "lora_jax_reroute",
)


class BuildError(RuntimeError):
    """The kernels could not be compiled or loaded; the message says why."""


def find_compiler() -> str | None:
    """Return the path of a C++ compiler, or None."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def sources() -> list[Path]:
    """Return the kernels' files in a fixed order."""
    folder = Path(__file__).parent
    return sorted(p for p in folder.iterdir() if p.suffix in (".cc", ".h"))


def cpu_name() -> str:
    """Return what -march=native depends on: the architecture and the CPU's features."""
    lines = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    wanted = ("model name", "flags", "Features")
    found = sorted({line for line in lines if line.startswith(wanted)})
    return "\n".join([platform.machine(), platform.processor(), *found])


def cache_key(compiler: str) -> str:
    """Return a digest of everything that the compiled library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    digest = hashlib.sha256()
    parts = [jax.__version__, jaxlib.version.__version__, compiler, *FLAGS, cpu_name()]
    for part in (*(p.encode() for p in parts), version, *(p.read_bytes() for p in sources())):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes while the block runs."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(folder: Path) -> Path:
    """Return the compiled library in `folder`, compiling it if it is not there yet.

    Raises:
        BuildError: there is no compiler, it fails, or the folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)}) on the path")
    library = folder / f"kernels-{cache_key(compiler)}.so"
    if library.exists():
        return library
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
    log.info("compiling the CPU kernels with %s, once for this machine", Path(compiler).name)
    start = time.perf_counter()
    part = library.with_suffix(f".{os.getpid()}.part")
    units = [str(p) for p in sources() if p.suffix == ".cc"]
    command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", *units, "-o", str(part)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        part.unlink(missing_ok=True)
        raise BuildError(f"{Path(compiler).name} failed: {result.stderr.strip()[:2000]}")
    part.replace(library)
    log.info("compiled the CPU kernels in %.1f s: %s", time.perf_counter() - start, library)


@functools.cache
def available() -> bool:
    """Return whether the kernels are registered with XLA, building them at the first call.

    Failure is logged once as a warning; the ops then run as portable JAX.
    """
    try:
        library = ctypes.CDLL(str(build(dispatch.cache_folder())))
        handlers = {name: jax.ffi.pycapsule(getattr(library, name)) for name in TARGETS}
    except (BuildError, OSError, AttributeError) as error:
        log.warning("CPU kernels are off, ops run as plain JAX (slower): %s", error)
        return False
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return True


def require() -> None:
    """Raise NotImplementedError unless the kernels are there and the platform is a CPU."""
    if jax.default_backend() != "cpu":
        raise NotImplementedError(f"CPU kernels cannot run on {jax.default_backend()}")
    if not available():
        raise NotImplementedError("the CPU kernels could not be built")
