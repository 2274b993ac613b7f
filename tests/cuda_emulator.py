"""Compiles the CUDA kernels for the emulator in cuda_backend/emulator, and calls them."""

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
from server_process import ROOT

CSRC = ROOT / "src" / "cuda_backend" / "csrc"
EMULATOR = ROOT / "tests" / "cuda_backend" / "emulator"
# What is not C++: arrays in shared memory, and launches.
REWRITES = (
    (
        r"extern __shared__ __align__\(\d+\) (unsigned char|int) (\w+)\[\];",
        r"auto* \2 = static_cast<\1*>(emu::dynamic_shared());",
    ),
    (
        r"__shared__ (unsigned char|int) (\w+)\[([^\]]+)\];",
        r"auto& \2 = emu::static_shared<\1[\3]>(__LINE__);",
    ),
    (r"(\w+)<<<(.*?), stream>>>\((.*?)\);", r"emu::launch(\1, \2, \3);"),
)


def compile_library(folder: Path) -> ctypes.CDLL:
    """Return the kernels as a library for this CPU; needs g++."""
    for header in CSRC.glob("*.cuh"):
        text = header.read_text()
        for pattern, replacement in REWRITES:
            text = re.sub(pattern, replacement, text, flags=re.DOTALL)
        (folder / header.name).write_text(text)
    for file in ("ptx.cuh", "tensor_map.cuh", "cluster.cuh", "drivers.cc"):
        shutil.copy(EMULATOR / file, folder)
    library = folder / "emulated.so"
    command = ["g++", "-std=c++20", "-O2", "-w", "-shared", "-fPIC", f"-I{EMULATOR / 'include'}"]
    done = subprocess.run(
        [*command, str(folder / "drivers.cc"), "-o", str(library)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:4000]
    return ctypes.CDLL(str(library))


def call(function, *args) -> None:
    """Call with arrays as pointers, None as null, ints and floats as they are; 0 must come back."""

    def passed(value):
        if isinstance(value, np.ndarray):
            assert value.flags.c_contiguous
            return value.ctypes.data_as(ctypes.c_void_p)
        return ctypes.c_float(value) if isinstance(value, float) else value

    assert function(*(passed(value) for value in args)) == 0
