"""A terabyte is mapped and counted without a byte of it."""

import numpy as np
import pytest

from bench.counting_memory import CountingDriver
from lora_jax.memory.driver import DriverMemory
from lora_jax.memory.pool import PagePool
from lora_jax.memory.weight_tensor import WeightTensor

PAGE = 1 << 30


def test_pages_are_counted_and_nothing_is_there():
    driver = CountingDriver(PAGE)
    pool = PagePool(DriverMemory(driver), page_bytes=PAGE, budget_bytes=1 << 40)
    tensor = WeightTensor(pool, (1024, 1 << 15, 1 << 14), np.dtype(np.float16))
    tensor.map(range(10))
    tensor.map(range(10, 1000))
    assert pool.stats().in_use == 1000
    tensor.unmap(range(10))
    assert pool.stats().in_use == 990
    assert {call[0] for call in driver.calls} == {"map", "grant", "unmap"}
    with pytest.raises(NotImplementedError, match="no bytes"):
        _ = tensor.array
