"""A jax.Array over memory that somebody else owns, of any dtype, without a copy."""

import ctypes

import jax
import numpy as np

from lora_jax.typing import Array

CPU, CUDA = 1, 2  # device types of DLPack
ALIGNMENT = {CPU: 64, CUDA: 256}  # less than that, and XLA copies without a word
_CODES = {  # name -> type code of DLPack
    "bfloat16": 4,
    "float16": 2,
    "float32": 2,
    "int8": 0,
    "int32": 0,
    "uint8": 1,
    "uint32": 1,
    "float8_e4m3fn": 10,
}
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    return libc


def _describe(
    address: int, shape: tuple[int, ...], dtype: np.dtype, device: tuple[int, int]
) -> int:
    """Return the address of a descriptor in C's heap, its shape behind it, that frees itself.

    The deleter is free(): XLA may call it after Python has shut down, where a Python function
    crashes, and calls even a missing one.
    """
    libc, rank = _libc(), len(shape)
    size = ctypes.sizeof(_ManagedTensor)
    block = libc.malloc(size + 2 * rank * ctypes.sizeof(ctypes.c_int64))
    if block is None:
        raise MemoryError("no memory for an array's descriptor")
    managed = _ManagedTensor.from_address(block)
    extents = (ctypes.c_int64 * (2 * rank)).from_address(block + size)
    stride = 1
    for axis in reversed(range(rank)):
        extents[axis], extents[rank + axis] = shape[axis], stride
        stride *= shape[axis]
    managed.tensor = _Tensor(
        address, _Device(*device), rank, _DataType(_CODES[dtype.name], dtype.itemsize * 8, 1)
    )
    pointer = ctypes.POINTER(ctypes.c_int64)
    managed.tensor.shape = ctypes.cast(block + size, pointer)
    managed.tensor.strides = ctypes.cast(block + size + 8 * rank, pointer)
    managed.context, managed.deleter = None, ctypes.cast(libc.free, ctypes.c_void_p)
    return block


class _Producer:
    """Methods that jax.dlpack calls for the descriptor."""

    def __init__(self, address: int, device: tuple[int, int]):
        self._place, self._device = address, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype = ctypes.py_object
        new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(self._place, _NAME, None)


def foreign_array(
    address: int, shape: tuple[int, ...], dtype: np.dtype, device: tuple[int, int] = (CPU, 0)
) -> Array:
    """Return a jax.Array of `shape` over `address` on `device` (type, number); it owns nothing.

    Raises:
        ValueError: an address that XLA would copy from, or a dtype without a code.
    """
    dtype = np.dtype(dtype)
    if dtype.name not in _CODES:
        raise ValueError(f"dtype {dtype} is not one of {', '.join(_CODES)}")
    if address % ALIGNMENT[device[0]]:
        raise ValueError(f"address {address:#x} is not a multiple of {ALIGNMENT[device[0]]}")
    array = jax.dlpack.from_dlpack(_Producer(_describe(address, shape, dtype, device), device))
    assert array.unsafe_buffer_pointer() == address, "from_dlpack made a copy"
    return array
