"""Counts pages of any amount of memory without having it: for plans, benchmarks and tests."""

import itertools

import numpy as np

from lora_jax.memory.driver import AbstractDriver
from lora_jax.memory.virtual import Access


class CountingDriver(AbstractDriver):
    """A device without bytes: addresses and handles are numbers, `calls` what was asked of it."""

    def __init__(self, granularity: int):
        self._granularity, self._next, self._handles = granularity, granularity, itertools.count()
        self.calls: list[tuple] = []

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, num_bytes: int) -> int:
        self._next += num_bytes
        return self._next - num_bytes

    def release(self, address: int, num_bytes: int) -> None:
        self.calls.append(("release", address, num_bytes))

    def create(self, num_bytes: int) -> int:
        return next(self._handles)

    def destroy(self, handle: int) -> None:
        self.calls.append(("destroy", handle))

    def map(self, address: int, handle: int, num_bytes: int) -> None:
        self.calls.append(("map", address, handle, num_bytes))

    def unmap(self, address: int, num_bytes: int) -> None:
        self.calls.append(("unmap", address, num_bytes))

    def grant(self, address: int, num_bytes: int, access: Access) -> None:
        self.calls.append(("grant", address, num_bytes, access))

    def export_fd(self, handle: int) -> int:
        raise NotImplementedError("no bytes, no descriptor")

    def import_fd(self, fd: int, num_bytes: int) -> int:
        return next(self._handles)

    def copy_in(self, address: int, host_address: int, num_bytes: int) -> None:
        self.calls.append(("copy_in", address, num_bytes))

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> None:
        self.calls.append(("copy_out", address, num_bytes))

    def copy_within(self, address: int, source: int, num_bytes: int) -> None:
        self.calls.append(("copy_within", address, num_bytes))

    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype):
        raise NotImplementedError("no bytes, no array")

    def device_used(self) -> int:
        return 0
