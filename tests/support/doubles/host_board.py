"""Boards of tests: that of a GPU with emulated kernels and numpy's memory; shorter waits."""

import contextlib
import ctypes
from collections.abc import Iterator

import numpy as np
from support.doubles.cuda_emulator import compile_board

from cuda_backend.host_board import HostBoard
from lora_jax.ops.cpu.host_board import calls


class EmulatedBoard(HostBoard):
    """One array of the host that a program reads by the emulated kernels."""

    def __init__(self, count: int):
        compile_board()
        memory = np.zeros(128 + 4 * count, np.uint8)
        start = -memory.ctypes.data % 64
        self._share(memory[start : start + 64 + 4 * count])


@contextlib.contextmanager
def patience(seconds: float, *, emulated: bool = False) -> Iterator[None]:
    """Have programs on the CPU wait so long for the host, in place of 20 seconds."""

    def set_to(seconds: float) -> None:
        if emulated:
            compile_board().set_board_patience(ctypes.c_double(seconds))
        else:
            calls().set_patience(seconds)

    set_to(seconds)
    try:
        yield
    finally:
        set_to(20.0)
