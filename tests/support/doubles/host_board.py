"""cuda_backend.host_board on a CPU: its kernels are emulated, its memory is numpy's."""

import contextlib
import ctypes
from collections.abc import Iterator

import numpy as np
from support.doubles.cuda_emulator import compile_board

from cuda_backend.host_board import HostBoard


class CpuBoard(HostBoard):
    """One array of the host that a program on a CPU reads when the host has posted it."""

    def __init__(self, count: int):
        compile_board()
        self._memory = np.zeros(64 // 4 + count + 16, np.int32)
        self._share(-(-self._memory.ctypes.data // 64) * 64, count)


@contextlib.contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Have emulated programs wait so long for the host, in place of 20 seconds."""
    set_patience = compile_board().set_board_patience
    set_patience(ctypes.c_double(seconds))
    try:
        yield
    finally:
        set_patience(ctypes.c_double(20.0))
