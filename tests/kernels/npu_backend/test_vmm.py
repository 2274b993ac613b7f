"""The Ascend memory over a host library of AscendCL's symbols: never run on a device."""

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.contracts.memory_contract import DriverDoubleContract, VirtualMemoryContract
from support.doubles.driver_double import Double, compile_double

from lora_jax.memory.driver import DriverMemory
from lora_jax.memory.virtual import Access, MappingError, OutOfPages
from npu_backend import acl
from npu_backend.vmm import AscendDriver

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on this machine")


OPERATIONS = ("reserve", "release", "create", "destroy", "map", "unmap", "copy")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    return compile_double(Path(__file__).with_name("acl_double.c"), tmp_path_factory.mktemp("acl"))


@pytest.fixture
def double(library):
    control = Double(library, OPERATIONS, refusal=507899, no_memory=acl.OUT_OF_MEMORY)
    yield control
    assert control.live() == (0, 0, 0)


@pytest.fixture
def memory(double):
    return DriverMemory(AscendDriver(0, double.path))


class TestMemory(VirtualMemoryContract):
    """Everything but sharing, which AscendCL does by keys."""


class TestRefusals(DriverDoubleContract):
    """One call after another fails."""


def test_pages_are_two_mebibytes(memory):
    assert memory.granularity == 2 << 20


def test_what_ascendcl_lacks_is_declined(memory):
    page = memory.granularity
    address, handle = memory.reserve(page), memory.create_page(page)
    memory.map(address, handle, page)
    memory.protect(address, page, Access.READ_WRITE)
    for access in (Access.NONE, Access.READ):
        with pytest.raises(NotImplementedError, match=access.name):
            memory.protect(address, page, access)
    with pytest.raises(NotImplementedError, match="keys"):
        memory.export_fd(handle)
    with pytest.raises(NotImplementedError, match="keys"):
        memory.import_fd(0, page)
    with pytest.raises(NotImplementedError, match="no Ascend"):
        memory.array(address, (4, 4), np.dtype(np.float32))
    memory.unmap(address, page)
    memory.destroy_page(handle)
    memory.release(address, page)


def test_the_largest_reservation_is_the_drivers(memory):
    with pytest.raises(OutOfPages, match="aclrtReserveMemAddress answers 207001"):
        memory.reserve(129 << 30)


def test_refusals_of_the_library_itself_reach_the_caller(double):
    """Past our own books: the driver refuses a double map, a misaligned one and a live release."""
    driver, page = AscendDriver(0, double.path), 2 << 20
    address, handle = driver.reserve(4 * page), driver.create(page)
    driver.map(address, handle, page)
    for call in (
        lambda: driver.map(address, handle, page),
        lambda: driver.map(address + page + 4096, handle, page),
        lambda: driver.map(address + 4 * page, handle, page),
        lambda: driver.map(address + page, handle, 2 * page),
        lambda: driver.unmap(address + page, page),
        lambda: driver.release(address, 4 * page),
        lambda: driver.create(3 << 20),
    ):
        with pytest.raises(MappingError, match="answers 507899: the double refuses"):
            call()
    driver.unmap(address, page)
    driver.destroy(handle)
    driver.release(address, 4 * page)


def test_unmapping_waits_for_the_device(double):
    """The double refuses to unmap unless the device was synchronised since the last time."""
    driver, page = AscendDriver(0, double.path), 2 << 20
    address, handle = driver.reserve(page), driver.create(page)
    driver.map(address, handle, page)
    assert double.library.aclrtUnmapMem(ctypes.c_void_p(address)) == 507899
    driver.unmap(address, page)
    driver.destroy(handle)
    driver.release(address, page)
