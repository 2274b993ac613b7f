"""The calls of AscendCL that virtual memory needs, through ctypes.

Signatures and layouts are facts of the public interface, the same in CANN 8.0 to 9.1; nothing of
CANN is contained or needed to install this.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

from lora_jax.memory.driver import load_library
from lora_jax.memory.virtual import MappingError, OutOfPages

LIBRARY = "libascendcl.so"
REPEATED_INITIALIZE = 100002
FEATURE_UNSUPPORTED = 207000
OUT_OF_MEMORY = 207001  # the one code that is the same everywhere
ON_DEVICE = 1  # location type
HBM_MEM_HUGE = 4  # the one attribute whose number never changed: 2 MiB pages
HBM_MEM = 1  # aclrtGetMemInfo: the device's memory as a whole
MINIMUM = 0  # granularity option
TO_DEVICE, TO_HOST = 1, 2  # kinds of copies


class Location(ctypes.Structure):
    """aclrtMemLocation, 8 bytes; unlike CUDA's, the number comes first."""

    _fields_ = (("id", c_uint32), ("type", c_int))


class PhysicalMemProp(ctypes.Structure):
    """aclrtPhysicalMemProp, 32 bytes."""

    _fields_ = (
        ("handle_type", c_int),
        ("allocation_type", c_int),
        ("mem_attr", c_int),
        ("location", Location),
        ("reserve", c_uint64),
    )


_SIGNATURES = {
    "aclInit": (c_char_p,),
    "aclrtSetDevice": (c_int32,),
    "aclrtSynchronizeDevice": (),
    "aclrtGetMemInfo": (c_int, POINTER(c_size_t), POINTER(c_size_t)),
    "aclrtMemGetAllocationGranularity": (POINTER(PhysicalMemProp), c_int, POINTER(c_size_t)),
    "aclrtReserveMemAddress": (POINTER(c_void_p), c_size_t, c_size_t, c_void_p, c_uint64),
    "aclrtReleaseMemAddress": (c_void_p,),
    "aclrtMallocPhysical": (POINTER(c_void_p), c_size_t, POINTER(PhysicalMemProp), c_uint64),
    "aclrtFreePhysical": (c_void_p,),
    "aclrtMapMem": (c_void_p, c_size_t, c_size_t, c_void_p, c_uint64),
    "aclrtUnmapMem": (c_void_p,),
    "aclrtMemcpy": (c_void_p, c_size_t, c_void_p, c_size_t, c_int),
}
_RECENT_ERROR = "aclGetRecentErrMsg"  # not in every version


class AscendCL:
    """A loaded AscendCL; every call raises where it answers an error."""

    def __init__(self, library: str = LIBRARY):
        """Raise NotImplementedError where there is no AscendCL, or one without these calls."""
        self._library = load_library(library, _SIGNATURES, "AscendCL")
        self._recent_error = getattr(self._library, _RECENT_ERROR, None)
        if self._recent_error is not None:
            self._recent_error.restype, self._recent_error.argtypes = c_char_p, ()
        # Others in this process, torch_npu above all, may have been first.
        if (code := self._library.aclInit(None)) not in (0, REPEATED_INITIALIZE):
            raise NotImplementedError(f"aclInit answers {code}")

    def call(self, name: str, *arguments) -> None:
        """Call the function.

        Codes differ between versions and devices, so only two are told apart.

        Raises:
            OutOfPages: the device is full.
            NotImplementedError: the device cannot do it.
            MappingError: any other answer.
        """
        code = getattr(self._library, name)(*arguments)
        if not code:
            return
        message = self._recent_error() if self._recent_error is not None else None
        text = f"{name} answers {code}" + (f": {message.decode()}" if message else "")
        if code == OUT_OF_MEMORY:
            raise OutOfPages(text)
        raise NotImplementedError(text) if code == FEATURE_UNSUPPORTED else MappingError(text)
