"""Virtual memory of one GPU over a double of the driver: bytes, and what a device cannot do."""

import ctypes
import shutil

import numpy as np
import pytest

from cuda_backend.vmm import CudaDriver
from lora_jax.memory.driver import DriverMemory
from lora_jax.memory.pool import PagePool
from lora_jax.memory.virtual import Access, MappingError
from lora_jax.memory.weight_tensor import WeightTensor

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")


def test_bytes_are_copied_in_within_and_out(double):
    device, before = CudaDriver(1, double.path), double.live()
    page = device.granularity
    address, handle = device.reserve(2 * page), device.create(page)
    device.map(address, handle, page)
    device.grant(address, page, Access.READ_WRITE)
    given, got = np.arange(64, dtype=np.uint8), np.zeros(192, np.uint8)
    assert device.copies_done()
    device.pin(given)
    device.begin_copy_in(address, given.ctypes.data, 64, given)
    device.finish_copies()
    assert device.copies_done()
    device.copy_within(address + 64, address, 64)
    device.copy_in(address + 128, given.ctypes.data, 64)
    device.clear(address + 128, 32)
    device.copy_out(got.ctypes.data, address, 192)
    np.testing.assert_array_equal(got[:128], np.tile(given, 2))
    np.testing.assert_array_equal(got[128:], np.where(np.arange(64) < 32, 0, given))
    assert device.device_used() >= page
    assert device.device_free() + device.device_used() == 1 << 30
    device.unmap(address, page)
    device.destroy(handle)
    device.release(address, 2 * page)
    assert double.live() == before


def test_pages_that_come_are_cleared_beside_the_engine(double):
    memory = DriverMemory(CudaDriver(0, double.path))
    page = memory.granularity
    pool = PagePool(memory, page_bytes=page, budget_bytes=4 * page)
    rows = WeightTensor(pool, (4, 1, page // 4), np.dtype(np.float32), cleared=True)

    def bytes_now(row: int) -> set[int]:
        return set(ctypes.string_at(rows.address + row * page, page))

    rows.map(range(0, 2))
    assert bytes_now(0) == bytes_now(1) == {0xFF}, "the thread that maps waited for the clear"
    rows.begin_write(1, np.full((1, 1, page // 4), 7.0, np.float32))
    memory.finish_writes()
    assert bytes_now(0) == {0}
    assert bytes_now(1) == set(np.float32(7.0).tobytes()), "a clear came behind the write"
    rows.map(range(2, 3))
    rows.unmap(range(2, 3))  # a clear that came behind it would find no page
    rows.map(range(3, 4))
    memory.finish_clears()
    assert bytes_now(3) == {0}
    rows.close()
    assert pool.stats().in_use == 0


def test_a_device_without_such_memory_is_refused(double, monkeypatch):
    device = CudaDriver(0, double.path)
    device._handle_type = 0
    with pytest.raises(NotImplementedError, match="CUDA device 0 exports no file descriptors"):
        device.export_fd(1)
    monkeypatch.setattr(CudaDriver, "_attribute", lambda self, attribute, ordinal: 0)
    with pytest.raises(NotImplementedError, match="device 0 has no virtual memory management"):
        CudaDriver(0, double.path)
    with pytest.raises(MappingError, match="cuDeviceGet answers"):
        CudaDriver(7, double.path)
