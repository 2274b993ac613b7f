"""Virtual memory of an Ascend NPU: aclrtReserveMemAddress, aclrtMallocPhysical, aclrtMapMem.

ExpertWeave, section 4.2, Table 2. What AscendCL lacks is declined: access other than READ_WRITE,
and file descriptors (it shares by 64-bit keys). A reservation takes at most 128 GB on A2 and A3.
"""

from ctypes import byref, c_size_t, c_void_p
from typing import NoReturn

import numpy as np

from lora_jax.memory.driver import AbstractDriver
from lora_jax.memory.virtual import Access
from npu_backend import acl


class AscendDriver(AbstractDriver):
    """The calls for one device of AscendCL."""

    def __init__(self, device: int = 0, library: str = acl.LIBRARY):
        """Raise NotImplementedError where there is no AscendCL with these calls."""
        self._acl = acl.AscendCL(library)
        self._device = device
        self._prop = acl.PhysicalMemProp(
            mem_attr=acl.HBM_MEM_HUGE, location=acl.Location(device, acl.ON_DEVICE)
        )
        size = c_size_t()
        self._call("aclrtMemGetAllocationGranularity", byref(self._prop), acl.MINIMUM, byref(size))
        self._granularity = size.value

    @property
    def granularity(self) -> int:
        return self._granularity

    def reserve(self, num_bytes: int) -> int:
        address = c_void_p()
        self._call("aclrtReserveMemAddress", byref(address), num_bytes, 0, None, 0)
        assert address.value, "AscendCL reserved nothing"
        return address.value

    def release(self, address: int, num_bytes: int) -> None:
        self._call("aclrtReleaseMemAddress", address)

    def create(self, num_bytes: int) -> int:
        handle = c_void_p()
        self._call("aclrtMallocPhysical", byref(handle), num_bytes, byref(self._prop), 0)
        assert handle.value, "AscendCL allocated nothing"
        return handle.value

    def destroy(self, handle: int) -> None:
        self._call("aclrtFreePhysical", handle)

    def map(self, address: int, handle: int, num_bytes: int) -> None:
        self._call("aclrtMapMem", address, num_bytes, 0, handle, 0)

    def unmap(self, address: int, num_bytes: int) -> None:
        # AscendCL orders this with no stream; what still runs may read the page.
        self._call("aclrtSynchronizeDevice")
        self._call("aclrtUnmapMem", address)

    def grant(self, address: int, num_bytes: int, access: Access) -> None:
        """Do nothing: the owner may read and write what it mapped, and nothing else can be set."""
        if access is not Access.READ_WRITE:
            raise NotImplementedError(f"AscendCL sets no access but READ_WRITE, not {access.name}")

    def export_fd(self, handle: int) -> NoReturn:
        raise NotImplementedError("AscendCL shares memory by keys, not by file descriptors")

    def import_fd(self, fd: int, num_bytes: int) -> NoReturn:
        raise NotImplementedError("AscendCL shares memory by keys, not by file descriptors")

    def copy_in(self, address: int, host_address: int, num_bytes: int) -> None:
        self._call("aclrtMemcpy", address, num_bytes, host_address, num_bytes, acl.TO_DEVICE)

    def copy_out(self, host_address: int, address: int, num_bytes: int) -> None:
        self._call("aclrtMemcpy", host_address, num_bytes, address, num_bytes, acl.TO_HOST)

    def copy_within(self, address: int, source: int, num_bytes: int) -> NoReturn:
        raise NotImplementedError("jax has no Ascend devices, so no arrays to copy")

    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype) -> NoReturn:
        raise NotImplementedError("jax has no Ascend devices")

    def device_used(self) -> int:
        free, total = c_size_t(), c_size_t()
        self._call("aclrtGetMemInfo", acl.HBM_MEM, byref(free), byref(total))
        return total.value - free.value

    def _call(self, name: str, *arguments) -> None:
        """Call AscendCL with this device as the calling thread's, which every call needs."""
        self._acl.call("aclrtSetDevice", self._device)
        self._acl.call(name, *arguments)
