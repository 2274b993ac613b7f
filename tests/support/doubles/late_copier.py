"""Copier for CPU arrays that copies as late as is allowed."""

import ctypes


class LateCopier:
    """Copies into arrays of the CPU when it is waited for, and says what it did.

    Asked whether it has, it says no for `late` times.
    """

    def __init__(self, late=0):
        self.begun, self.log = [], []
        self._late = self._times = late

    def begin_write_into(self, array, offset, data):
        assert data.flags.c_contiguous
        assert 0 <= offset <= array.nbytes - data.nbytes
        assert array.dtype == data.dtype
        self.begun.append((array.unsafe_buffer_pointer() + offset, data))
        self.log.append("begin")

    def pin(self, data):
        self.log.append("pin")

    def writes_done(self):
        self.log.append("ask")
        self._times = self._times - 1 if self._times else self._late
        return self._times == self._late

    def finish_writes(self):
        for address, data in self.begun:
            ctypes.memmove(address, data.ctypes.data, data.nbytes)
        self.begun.clear()
        self.log.append("finish")
