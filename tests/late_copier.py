"""Who copies rows into arrays of the CPU, as late as is allowed."""

import ctypes


class LateCopier:
    """Copies into arrays of the CPU when it is waited for, and says what it did."""

    def __init__(self):
        self.begun, self.log = [], []

    def begin_write_into(self, array, offset, data):
        assert data.flags.c_contiguous
        assert 0 <= offset <= array.nbytes - data.nbytes
        assert array.dtype == data.dtype
        self.begun.append((array.unsafe_buffer_pointer() + offset, data))
        self.log.append("begin")

    def finish_writes(self):
        for address, data in self.begun:
            ctypes.memmove(address, data.ctypes.data, data.nbytes)
        self.begun.clear()
        self.log.append("finish")
