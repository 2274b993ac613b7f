"""Device memory of a killed process holds only zeros for the next one."""

import json
import subprocess
import sys

import pytest

CODE = """
import ctypes, json, sys
from cuda_backend import driver as cuda
calls = cuda.Driver()
device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
free, total = ctypes.c_size_t(), ctypes.c_size_t()
calls.call("cuDeviceGet", ctypes.byref(device), 0)
calls.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
calls.call("cuCtxPushCurrent_v2", context)
calls.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
size = int(free.value * 0.9)
calls.call("cuMemAlloc_v2", ctypes.byref(address), size)
if sys.argv[1] == "fill":
    calls.call("cuMemsetD8Async", address, 0xA7, size, None)
    calls.call("cuCtxSynchronize")
piece, filled, others = 1 << 20, 0, 0
held = ctypes.create_string_buffer(piece)
for number in range(512):
    start = address.value + (size - piece) // 511 * number
    calls.call("cuMemcpyDtoH_v2", held, start, piece)
    filled += held.raw.count(0xA7)
    others += piece - held.raw.count(0xA7) - held.raw.count(0)
print(json.dumps([size, filled, others]), flush=True)
sys.stdin.read()
"""


def process(what: str) -> subprocess.Popen:
    command = [sys.executable, "-c", CODE, what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.gpu
def test_memory_of_a_killed_process_is_zero_for_the_next_one():
    """The driver clears it: 512 MiB are looked at, spread over nine tenths of what is free."""
    first = process("fill")
    size, filled, _ = json.loads(first.stdout.readline())
    assert filled == 512 << 20
    first.kill()
    first.communicate()
    second = process("look")
    found = json.loads(second.stdout.readline())
    second.communicate("")
    assert found[0] > size // 2
    assert found[1:] == [0, 0]
