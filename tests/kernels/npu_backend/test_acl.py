"""Declarations of AscendCL: layouts as published, absence and refusal are said."""

import ctypes
import importlib.util
import shutil
from pathlib import Path

import pytest
from support.checks.abi_check import assertions, compile_errors

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


def acl_include() -> Path | None:
    """The folder of the acl headers that a torch_npu on this machine carries."""
    found = importlib.util.find_spec("torch_npu")
    folder = Path(found.origin).parent / "include" if found and found.origin else None
    return folder if folder and (folder / "acl" / "acl_rt.h").exists() else None


STRUCTURES = {
    "aclrtMemLocation": (acl.Location, {"id": "id", "type": "type"}),
    "aclrtPhysicalMemProp": (
        acl.PhysicalMemProp,
        {
            "handleType": "handle_type",
            "allocationType": "allocation_type",
            "memAttr": "mem_attr",
            "location": "location",
            "reserve": "reserve",
        },
    ),
}
CONSTANTS = {
    "ACL_ERROR_REPEAT_INITIALIZE": acl.REPEATED_INITIALIZE,
    "ACL_ERROR_RT_FEATURE_NOT_SUPPORT": acl.FEATURE_UNSUPPORTED,
    "ACL_ERROR_RT_MEMORY_ALLOCATION": acl.OUT_OF_MEMORY,
    "ACL_MEM_LOCATION_TYPE_DEVICE": acl.ON_DEVICE,
    "ACL_HBM_MEM_HUGE": acl.HBM_MEM_HUGE,
    "ACL_HBM_MEM": acl.HBM_MEM,
    "ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM": acl.MINIMUM,
    "ACL_MEMCPY_HOST_TO_DEVICE": acl.TO_DEVICE,
    "ACL_MEMCPY_DEVICE_TO_HOST": acl.TO_HOST,
}


@pytest.mark.skipif(acl_include() is None, reason="no torch_npu with acl headers is installed")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_declarations_agree_with_an_installed_header(tmp_path):
    headers = ("acl/acl_base.h", "acl/acl_rt.h", "acl/acl.h")
    program = assertions(headers, STRUCTURES, acl._SIGNATURES, CONSTANTS)
    assert compile_errors(program, acl_include(), tmp_path) == ""
    wrong = {**acl._SIGNATURES, "aclrtUnmapMem": (ctypes.c_void_p, ctypes.c_size_t)}
    program = assertions(headers, STRUCTURES, wrong, CONSTANTS)
    assert "aclrtUnmapMem" in compile_errors(program, acl_include(), tmp_path)
