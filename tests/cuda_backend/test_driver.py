"""Declarations of the CUDA driver: layouts as published, absence is said."""

import ctypes

import pytest

from cuda_backend import driver


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
