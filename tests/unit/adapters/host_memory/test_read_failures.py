"""A folder that cannot be read is refused for a while without reading it."""

import pytest

from lora_jax.adapters.host_memory.read_failures import ReadFailures
from lora_jax.adapters.registry_errors import AdapterRejected, RegistryBusy


def test_errors_are_remembered_for_some_seconds():
    now = [0.0]
    failures = ReadFailures(2, lambda: now[0])
    failures.remember("a", AdapterRejected("broken"))
    failures.remember("busy", RegistryBusy("full", 3.0))
    failures.remember("key", RegistryBusy("yours", of_key=True))
    for name, text in (("a", "broken"), ("busy", "full")):
        with pytest.raises(AdapterRejected, match=text):
            failures.check(name)
    failures.check("key")
    now[0] = 4.0
    failures.check("busy")
    now[0] = 9.0
    with pytest.raises(AdapterRejected):
        failures.check("a")
    failures.forget("a")
    failures.check("a")


def test_old_errors_make_way():
    now = [0.0]
    failures = ReadFailures(3, lambda: now[0])
    for number in range(50):
        now[0] += 5.0
        failures.remember(str(number), AdapterRejected("broken"))
    assert len(failures._failures) <= 4
