"""Arrays over foreign memory: same pointer, later writes seen, silent copies refused."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lora_jax.memory.dlpack import foreign_array


def aligned(num_bytes: int) -> np.ndarray:
    """Bytes that begin at a multiple of 64."""
    raw = np.zeros(num_bytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + num_bytes]


DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32, np.int32, np.uint32, np.int8, np.uint8)
DTYPES += (ml_dtypes.float8_e4m3fn,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_array_is_the_memory(dtype):
    memory = aligned(24 * np.dtype(dtype).itemsize)
    array = foreign_array(memory.ctypes.data, (2, 3, 4), np.dtype(dtype))
    assert array.unsafe_buffer_pointer() == memory.ctypes.data
    assert (array.shape, array.dtype) == ((2, 3, 4), np.dtype(dtype))
    memory.view(dtype)[:] = np.arange(24)
    np.testing.assert_array_equal(
        np.asarray(array), np.arange(24).astype(dtype).reshape(2, 3, 4), strict=True
    )


def test_a_compiled_program_sees_later_writes():
    memory = aligned(64).view(np.float32)
    array = foreign_array(memory.ctypes.data, (16,), np.dtype(np.float32))
    total = jax.jit(jnp.sum)
    memory[:] = 1
    assert float(total(array)) == 16
    memory[3] = 5
    assert float(total(array)) == 20


def test_an_address_that_would_be_copied_is_refused():
    memory = aligned(256)
    with pytest.raises(ValueError, match="not a multiple of 64"):
        foreign_array(memory.ctypes.data + 32, (4,), np.dtype(np.float32))


def test_a_dtype_without_a_code_is_refused():
    with pytest.raises(ValueError, match="float64"):
        foreign_array(aligned(64).ctypes.data, (4,), np.dtype(np.float64))


def test_the_descriptor_is_freed_in_c_also_after_python_is_gone():
    """Arrays that live to the end of the process must not end it badly."""
    code = (
        "import numpy as np, mmap, ctypes\n"
        "from lora_jax.memory.dlpack import foreign_array\n"
        "m = mmap.mmap(-1, 4096)\n"
        "p = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "kept = [foreign_array(p, (8, 8), np.dtype(np.float32)) for _ in range(100)]\n"
        "del kept[:50]\n"
        "print(float(kept[0].sum()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "0.0"), done.stderr[-2000:]
