"""Memories for tests: that fail on demand, that write late, and that only count pages."""

from collections.abc import Sequence

import numpy as np

from bench.counting_memory import CountingDriver
from lora_jax.memory.driver import DriverMemory
from lora_jax.memory.virtual import AbstractVirtualMemory, Access, MappingError, OutOfPages, Usage


class Injected(MappingError):
    """A refusal that a test asked for."""


class FaultyMemory(AbstractVirtualMemory):
    """Another memory, in which one call of one operation fails once before it does anything."""

    def __init__(self, memory: AbstractVirtualMemory):
        self._memory = memory
        self._fault: tuple[str, int] | None = None

    def fail(self, operation: str, after: int) -> None:
        """Let a call of `operation` fail when `after` others of it have passed."""
        self._fault = (operation, after)

    def heal(self) -> bool:
        """Forget the fault; return whether it is still ahead."""
        ahead, self._fault = self._fault is not None, None
        return ahead

    def _pass(self, operation: str) -> None:
        if self._fault and self._fault[0] == operation:
            after = self._fault[1]
            self._fault = (operation, after - 1) if after else None
            if not after:
                raise (OutOfPages if operation == "create_page" else Injected)("injected")

    @property
    def granularity(self) -> int:
        return self._memory.granularity

    def reserve(self, num_bytes: int) -> int:
        self._pass("reserve")
        return self._memory.reserve(num_bytes)

    def release(self, address: int, num_bytes: int) -> None:
        self._memory.release(address, num_bytes)

    def create_page(self, num_bytes: int) -> int:
        self._pass("create_page")
        return self._memory.create_page(num_bytes)

    def destroy_page(self, handle: int) -> None:
        self._pass("destroy_page")
        self._memory.destroy_page(handle)

    def map_run(self, address: int, handles: Sequence[int], num_bytes: int) -> None:
        self._pass("map_run")
        self._memory.map_run(address, handles, num_bytes)

    def unmap(self, address: int, num_bytes: int) -> None:
        self._pass("unmap")
        self._memory.unmap(address, num_bytes)

    def protect(self, address: int, num_bytes: int, access: Access) -> None:
        self._memory.protect(address, num_bytes, access)

    def export_fd(self, handle: int) -> int:
        self._pass("export_fd")
        return self._memory.export_fd(handle)

    def import_fd(self, fd: int, num_bytes: int) -> int:
        self._pass("import_fd")
        return self._memory.import_fd(fd, num_bytes)

    def write(self, address: int, data: np.ndarray) -> None:
        self._pass("write")
        self._memory.write(address, data)

    def clear(self, address: int, num_bytes: int) -> None:
        self._pass("clear")
        self._memory.clear(address, num_bytes)

    def read(self, address: int, num_bytes: int) -> bytes:
        return self._memory.read(address, num_bytes)

    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype):
        return self._memory.array(address, shape, dtype)

    def usage(self) -> Usage:
        return self._memory.usage()


class LateMemory(FaultyMemory):
    """A memory whose begun writes arrive when they are waited for; `begun` are those before."""

    def __init__(self, memory: AbstractVirtualMemory):
        super().__init__(memory)
        self.begun: list[tuple[int, np.ndarray]] = []

    def begin_write(self, address: int, data: np.ndarray) -> None:
        self._pass("begin_write")
        self.begun.append((address, data))

    def writes_done(self) -> bool:
        return not self.begun

    def finish_writes(self) -> None:
        while self.begun:
            self.write(*self.begun.pop())


def counting_memory(granularity: int) -> tuple[DriverMemory, list[tuple]]:
    """A memory of any size that holds no bytes, and the list of the calls that reach its driver."""
    driver = CountingDriver(granularity)
    return DriverMemory(driver), driver.calls
