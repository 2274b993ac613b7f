"""Compiles the CUDA kernels for the emulator in cuda_backend/emulator, and calls them."""

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import numpy as np
from support.processes.server_process import ROOT

from lora_jax.ops import native

CSRC = ROOT / "src" / "cuda_backend" / "csrc"
EMULATOR = ROOT / "tests" / "kernels" / "cuda_backend" / "emulator"
BUILT = ROOT / ".cache" / "emulator"
# What is not C++: arrays in shared memory, and launches.
REWRITES = (
    (
        r"extern __shared__ __align__\(\d+\) (unsigned char|int) (\w+)\[\];",
        r"auto* \2 = static_cast<\1*>(emu::dynamic_shared());",
    ),
    (
        r"__shared__ ((?:const |unsigned )*\w+\*?) (\w+)\[([^\]]+)\];",
        r"auto& \2 = emu::static_shared<\1[\3]>(__LINE__);",
    ),
    (r"(\w+(?:<\w+(?:, \w+)*>)?)<<<(.*?), stream>>>\((.*?)\);", r"emu::launch(\1, \2, \3);"),
    # A fiber a thread: grids that fill a GPU's SMs with copies would take seconds.
    (r"kBoardThreads = 256, kBoardCtas = 1024;", "kBoardThreads = 32, kBoardCtas = 2;"),
    (r"constexpr uint64_t kBoardPatience", "inline uint64_t kBoardPatience"),  # a test is short
    (r"kPeerThreads = 512,", "kPeerThreads = 64,"),
    (r"kReceiveThreads = 256;", "kReceiveThreads = 64;"),
    (r"kPeerCtas = 64;", "kPeerCtas = 2;"),
    (r"kAsideThreads = 128, kAsideCtas = 48;", "kAsideThreads = 64, kAsideCtas = 1;"),
    (r"kGatherCtas = 128;", "kGatherCtas = 3;"),
    (r"kWordThreads = 128, kDirectThreads = 512,", "kWordThreads = 32, kDirectThreads = 32,"),
    (r"kWordBytes = 352 << 10;", "kWordBytes = 1 << 10;"),
    (r"kMostWordBytes = 352 << 10;", "kMostWordBytes = 3 << 9;"),
    (r"kForwardThreads = 512;", "kForwardThreads = 32;"),
    (r"kForwardCtas = 16;", "kForwardCtas = 2;"),
    (r"kDenseCtas = 132;", "kDenseCtas = 2;"),
)
TRANSPORT_CALLS = (
    "push",
    "push_aside",
    "wait_add",
    "wait_add_aside",
    "take",
    "judge",
    "answer",
)


def compile_library(folder: Path, driver: str, headers: tuple[Path, ...] = ()) -> ctypes.CDLL:
    """Return the kernels that a driver calls as a library for this CPU; needs g++.

    `headers` are further ones of the kernels. Workers of a run share what one has compiled.
    """
    for header in (*CSRC.rglob("*.cuh"), *headers):
        text = header.read_text()
        for pattern, replacement in REWRITES:
            text = re.sub(pattern, replacement, text, flags=re.DOTALL)
        inside = header.relative_to(CSRC) if header.is_relative_to(CSRC) else header.name
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        (folder / inside).write_text(text)
    for file in ("arithmetic.cuh", "ptx.cuh", "tensor_map.cuh", "cluster.cuh", "wgmma.cuh"):
        shutil.copy(EMULATOR / file, folder / "device")
    for file in ("driver.cuh", driver):
        shutil.copy(EMULATOR / file, folder)
    library = folder / "emulated.so"
    include = [f"-I{EMULATOR / 'include'}", f"-I{jax.ffi.include_dir()}"]
    command = ["g++", "-std=c++20", "-O1", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC", *include]
    built = BUILT / f"{_digest(command, folder)}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    with native.locked(built.with_suffix(".lock"), f"Another process compiles {driver}."):
        if not built.exists():
            _compile([*command, f"-I{folder}", str(folder / driver)], built)
    shutil.copy(built, library)
    return ctypes.CDLL(str(library))


def _compile(command: list[str], library: Path) -> None:
    part = library.with_suffix(".part")
    command = [*command, "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    part.replace(library)


def _digest(command: list[str], folder: Path) -> str:
    """Return what names a library: of its command, its sources and the emulator's headers."""
    digest = hashlib.sha256(f"{jax.__version__} {' '.join(command)}".encode())
    sources = [*folder.rglob("*.cu*"), *folder.glob("*.cc"), *EMULATOR.rglob("*.h")]
    for file in sorted(sources):
        name = file.relative_to(folder) if file.is_relative_to(folder) else file.name
        digest.update(str(name).encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def compile_transport(folder: Path) -> ctypes.CDLL:
    """Return the transport's kernels, their custom calls registered with XLA's CPU platform.

    They are compiled once in a process, for which XLA takes a name once; a copy lies in the folder.
    """
    library, code = _transport()
    (folder / "emulated.so").write_bytes(code)
    return library


@functools.cache
def _transport() -> tuple[ctypes.CDLL, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder), "peer.cc")
        code = (Path(folder) / "emulated.so").read_bytes()
    for name in TRANSPORT_CALLS:
        handler = jax.ffi.pycapsule(getattr(library, f"lora_jax_cuda_peer_{name}"))
        jax.ffi.register_ffi_target(f"lora_jax_cuda_peer_{name}", handler, platform="cpu")
    return library, code


@functools.cache
def compile_board() -> ctypes.CDLL:
    """Give XLA's CPU platform the emulated wait for the host."""
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder), "board.cc")
    name = "lora_jax_cuda_read_board"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


@functools.cache
def compile_forward() -> ctypes.CDLL:
    """Return the kernel that forwards messages by NVSHMEM, over one of the tests."""
    kernel = ROOT / "src" / "cuda_backend" / "csrc_nvshmem" / "forward.cuh"
    with tempfile.TemporaryDirectory() as folder:
        library = compile_library(Path(folder), "forward.cc", (kernel,))
    name = "lora_jax_cuda_nvshmem_forward_after"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


def call(function, *args) -> None:
    """Call with arrays as pointers, None as null, ints and floats as they are; 0 must come back."""

    def passed(value):
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous
            return value.ctypes.data_as(ctypes.c_void_p)
        return ctypes.c_float(value) if isinstance(value, float) else value

    assert function(*(passed(value) for value in args)) == 0


def copied(array: np.ndarray | jax.Array, dtype: object = None) -> np.ndarray:
    """Return a copy that a kernel may write to."""
    return np.array(array, dtype, copy=True, order="C")
