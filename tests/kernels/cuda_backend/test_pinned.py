"""Pinned host memory and its lifetime, over a driver that records its calls."""

import numpy as np
import pytest

from cuda_backend.pinned import PinnedArrays
from lora_jax.memory.virtual import MappingError

MIB = 1 << 20


class Calls:
    def __init__(self):
        self.pinned, self.refuse = {}, False

    def __call__(self, name, start, *rest):
        if self.refuse:
            raise MappingError("no")
        if name == "cuMemHostRegister_v2":
            assert start not in self.pinned
            self.pinned[start] = rest[0]
        else:
            assert name == "cuMemHostUnregister"
            del self.pinned[start.value]


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def arrays(calls):
    return PinnedArrays(calls)


def test_the_memory_under_a_view_is_pinned_once_and_while_it_lives(calls, arrays):
    whole = np.zeros(3 * MIB, np.uint8)
    start = whole.ctypes.data
    arrays.pin(whole[MIB : 2 * MIB].view(np.uint16))
    arrays.pin(whole[2 * MIB :])
    assert calls.pinned == {start: 3 * MIB}
    assert arrays.holds(start, 3 * MIB)
    assert arrays.holds(start + 5, 100)
    assert not arrays.holds(start + 5, 3 * MIB)
    assert not arrays.holds(start - 1, 1)
    del whole
    assert not calls.pinned
    assert not arrays.holds(start, 1)


def test_small_arrays_and_memory_of_others_are_left_alone(calls, arrays):
    foreign = np.frombuffer(bytearray(2 * MIB), np.uint8)
    arrays.pin(np.zeros(MIB - 1, np.uint8))
    arrays.pin(foreign[MIB // 2 :])
    assert not calls.pinned


def test_what_the_driver_refuses_stays_as_it_is(calls, arrays):
    calls.refuse, array = True, np.zeros(MIB, np.uint8)
    arrays.pin(array)
    assert not arrays.holds(array.ctypes.data, 1)
    calls.refuse = False
    arrays.pin(array)
    assert arrays.holds(array.ctypes.data, MIB)
