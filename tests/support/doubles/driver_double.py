"""Host libraries with a driver's symbols: compiled from C, with faults on demand."""

import ctypes
import subprocess
from pathlib import Path

# Of cuda_double.c, in the order of its enum.
CUDA_OPERATIONS = (
    *("reserve", "release", "create", "destroy", "map", "unmap", "grant", "copy", "export"),
)


def cuda_double(folder: Path) -> "Double":
    """Compile the double of the CUDA driver and return its controls."""
    path = compile_double(Path(__file__).with_name("cuda_double.c"), folder)
    return Double(path, CUDA_OPERATIONS, refusal=1, no_memory=2)


def compile_double(source: Path, folder: Path) -> str:
    """Compile a double and return the library's path."""
    path = folder / f"lib{source.stem}.so"
    command = ["gcc", "-Wall", "-Werror", "-O1", "-shared", "-fPIC", source, "-o", path]
    subprocess.run([*command, "-lpthread"], check=True, timeout=120)
    return str(path)


class Double:
    """The controls of a double: `operations` in the order of its enum, and its codes."""

    def __init__(self, path: str, operations: tuple[str, ...], refusal: int, no_memory: int):
        self.path, self.operations = path, operations
        self.refusal, self.no_memory = refusal, no_memory
        self.library = ctypes.CDLL(path)
        self.library.double_live.restype = ctypes.c_long
        self.library.double_capacity.argtypes = [ctypes.c_size_t]
        self.capacity(1 << 30)

    def fail(self, operation: str, after: int, code: int | None = None) -> None:
        """Let one call fail once `after` others have passed; below 0: none."""
        number = self.operations.index(operation) if after >= 0 else -1
        self.library.double_fail(number, after, self.refusal if code is None else code)

    def capacity(self, num_bytes: int) -> None:
        """Set the device's memory."""
        self.library.double_capacity(num_bytes)

    def live(self) -> tuple[int, ...]:
        """Count reservations, mappings, pieces of physical memory."""
        return tuple(self.library.double_live(what) for what in range(3))
