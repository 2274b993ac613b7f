"""Declarations of AscendCL: layouts as published, absence and refusal are said."""

import ctypes

import pytest

from npu_backend import acl


def test_structures_are_laid_out_as_the_interface_says():
    assert ctypes.sizeof(acl.Location) == 8
    assert (acl.Location.id.offset, acl.Location.type.offset) == (0, 4)
    assert ctypes.sizeof(acl.PhysicalMemProp) == 32
    fields = ("handle_type", "allocation_type", "mem_attr", "location", "reserve")
    offsets = [getattr(acl.PhysicalMemProp, field).offset for field in fields]
    assert offsets == [0, 4, 8, 12, 24]


def test_no_library_is_said():
    with pytest.raises(NotImplementedError, match="no AscendCL"):
        acl.AscendCL("libascendcl-that-is-not-there.so")


def test_a_library_without_the_calls_is_said():
    with pytest.raises(NotImplementedError, match="aclInit"):
        acl.AscendCL("libc.so.6")
