"""Declarations of the CUDA driver: layouts as published, absence is said."""

import ctypes
import shutil
from pathlib import Path

import pytest
from support.checks.abi_check import assertions, compile_errors

from cuda_backend import driver
from cuda_backend.toolkit import find_compilers
from lora_jax.memory.virtual import Access


def test_structures_are_laid_out_as_in_cuda_h():
    assert ctypes.sizeof(driver.Location) == 8
    assert ctypes.sizeof(driver.AllocationProp) == 32
    fields = ("type", "handle_types", "location", "win32_metadata", "flags")
    assert [getattr(driver.AllocationProp, f).offset for f in fields] == [0, 4, 8, 16, 24]
    assert ctypes.sizeof(driver.AccessDesc) == 12


def test_no_driver_is_said():
    with pytest.raises(NotImplementedError, match="no CUDA driver"):
        driver.Driver("libcuda-that-is-not-there.so.1")


def test_a_library_without_the_calls_is_said():
    with pytest.raises(NotImplementedError, match="cuInit"):
        driver.Driver("libc.so.6")


def cuda_include() -> Path | None:
    """The folder of an installed cuda.h: beside nvcc, or in the toolkit's usual places."""
    folders = sorted(Path("/usr/local").glob("cuda*/include"))
    found = [Path(c.path).resolve().parents[1] / "include" for c in find_compilers()]
    folders = [*found, *folders]
    return next((folder for folder in folders if (folder / "cuda.h").exists()), None)


STRUCTURES = {
    "CUmemLocation": (driver.Location, {"type": "type", "id": "id"}),
    "CUmemAllocationProp": (
        driver.AllocationProp,
        {
            "type": "type",
            "requestedHandleTypes": "handle_types",
            "location": "location",
            "win32HandleMetaData": "win32_metadata",
            "allocFlags": "flags",
        },
    ),
    "CUmemAccessDesc": (driver.AccessDesc, {"location": "location", "flags": "flags"}),
}
CONSTANTS = {
    "CUDA_ERROR_OUT_OF_MEMORY": driver.OUT_OF_MEMORY,
    "CUDA_ERROR_NOT_SUPPORTED": driver.NOT_SUPPORTED,
    "CU_MEM_ALLOCATION_TYPE_PINNED": driver.PINNED,
    "CU_MEM_LOCATION_TYPE_DEVICE": driver.ON_DEVICE,
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": driver.POSIX_FD,
    "CU_MEM_ALLOC_GRANULARITY_MINIMUM": driver.MINIMUM,
    "CU_MEM_ACCESS_FLAGS_PROT_NONE": Access.NONE.value,
    "CU_MEM_ACCESS_FLAGS_PROT_READ": Access.READ.value,
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": Access.READ_WRITE.value,
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": (
        driver.VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    ),
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": (
        driver.HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
    ),
}


@pytest.mark.skipif(cuda_include() is None, reason="no CUDA toolkit on this machine")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_declarations_agree_with_the_installed_header(tmp_path):
    program = assertions(("cuda.h",), STRUCTURES, driver._SIGNATURES, CONSTANTS)
    assert compile_errors(program, cuda_include(), tmp_path) == ""
    wrong = {**driver._SIGNATURES, "cuMemUnmap": (ctypes.c_void_p, ctypes.c_size_t)}
    program = assertions(("cuda.h",), STRUCTURES, wrong, CONSTANTS)
    assert "cuMemUnmap" in compile_errors(program, cuda_include(), tmp_path)
