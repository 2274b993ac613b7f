"""Loads in a minute are counted, and the next permit has a time."""

import pytest

from lora_jax.adapters.host_memory.load_rate import LoadRate
from lora_jax.adapters.registry_errors import RegistryBusy


def test_permits_come_back_after_a_minute():
    now = [0.0]
    rate = LoadRate(2, lambda: now[0])
    rate.take()
    now[0] = 20.0
    rate.take()
    with pytest.raises(RegistryBusy, match="More than 2") as busy:
        rate.take()
    assert busy.value.retry_after_s == 40
    now[0] = 60.0
    rate.take()
    with pytest.raises(RegistryBusy):
        rate.take()
