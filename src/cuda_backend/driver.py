"""The calls of the CUDA driver that virtual memory and the transport need, through ctypes.

Signatures and layouts as in cuda.h of CUDA 11.3 to 13. No package is needed beyond the driver.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint64, c_ushort, c_void_p

from lora_jax.memory.driver import load_library
from lora_jax.memory.virtual import MappingError, OutOfPages

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2
NOT_READY = 600
NOT_SUPPORTED = 801
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
FOR_ALL_DEVICES = 3  # CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the legacy stream
HIGHEST_PRIORITY = -(1 << 16)  # of a stream: the driver takes the nearest that the device has
UUID_BYTES = 16
IS_LEGACY_IPC_CAPABLE = 13  # CU_POINTER_ATTRIBUTE_...: cuMemAlloc has given it
# CU_DEVICE_ATTRIBUTE_...
VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    """The flags at the end of CUmemAllocationProp; all zero here."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp, 32 bytes."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_metadata", c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc, 12 bytes."""

    _fields_ = (("location", Location), ("flags", c_int))


_SIGNATURES = {  # a CUdeviceptr and a generic allocation handle are 64-bit integers
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetUuid_v2": (c_void_p, c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuCtxSynchronize": (),
    "cuStreamCreate": (POINTER(c_void_p), ctypes.c_uint),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), ctypes.c_uint, c_int),
    "cuStreamQuery": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemGetInfo_v2": (POINTER(c_size_t), POINTER(c_size_t)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProp), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(AllocationProp), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(AccessDesc), c_size_t),
    "cuMemExportToShareableHandle": (c_void_p, c_uint64, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(c_uint64), c_void_p, c_int),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyDtoD_v2": (c_uint64, c_uint64, c_size_t),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuPointerGetAttribute": (c_void_p, c_int, c_uint64),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemsetD8Async": (c_uint64, ctypes.c_ubyte, c_size_t, c_void_p),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, ctypes.c_uint),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (c_void_p,),
}


class Driver:
    """A loaded driver library; every call raises where the driver answers an error."""

    def __init__(self, library: str = LIBRARY):
        """Raise NotImplementedError where there is no driver, or one without these calls."""
        self._library = load_library(library, _SIGNATURES, "CUDA driver")
        if code := self._library.cuInit(0):
            raise NotImplementedError(f"the CUDA driver finds no device: {self._name(code)}")

    def call(self, name: str, *arguments) -> None:
        """Call the function.

        Raises:
            OutOfPages: the device or the driver's own memory is full.
            NotImplementedError: the device cannot do it.
            MappingError: any other answer.
        """
        code = getattr(self._library, name)(*arguments)
        if not code:
            return
        message = f"{name} answers {self._name(code)}"
        if code == OUT_OF_MEMORY:
            raise OutOfPages(message)
        raise NotImplementedError(message) if code == NOT_SUPPORTED else MappingError(message)

    def is_idle(self, stream: c_void_p) -> bool:
        """True if all that was sent to a stream has ended, or has failed."""
        return self._library.cuStreamQuery(stream) != NOT_READY

    def _name(self, code: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(text))
        return f"{(text.value or b'an unknown error').decode()} ({code})"
