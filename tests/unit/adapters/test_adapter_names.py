"""Names of adapters, in memory or not."""

import pytest
from support.cases.host_entries import entry

from lora_jax.adapters.adapter_names import AdapterNames
from lora_jax.adapters.entries import RegistryLimits
from lora_jax.adapters.host_memory.room import HostShare
from lora_jax.adapters.host_memory.tier import HostTier
from lora_jax.adapters.host_memory.use_ledger import UseLedger
from lora_jax.adapters.registry_errors import RegistryBusy


@pytest.fixture
def names():
    limits, ledger = RegistryLimits(max_adapters=2, max_total_bytes=10), UseLedger()
    made = AdapterNames(HostTier(ledger, limits, lambda: 0.0), ledger, limits)
    made.room = lambda new: made.make_room(new, HostShare(), made._tier.staying(), None)
    return made


def test_a_name_is_in_memory_then_evicted_then_nothing(names):
    kept = names.put(entry("a", "da", 6), owner="key")
    assert (kept.owner, kept.generation, names.use("a")) == ("key", 1, kept)
    names.room(entry("b", "db", 6))
    assert "a" in names
    assert names.use("a") is None
    assert [known.digest for known in names.known()] == ["da"]
    assert names.knows_digest("da")
    assert names.digest_of("a") == "da"
    assert [name for name, _ in names.take_changes()] == ["a"]
    assert names.forget("a").digest == "da"
    assert "a" not in names
    assert not names.knows_digest("da")
    assert names.take_changes() == [("a", None)]
    assert names.forget("a") is None


def test_files_that_were_read_without_room_are_known(names):
    names.put_evicted(entry("a", "da", 6))
    assert [(known.name, known.report.weight_bytes) for known in names.known()] == [("a", 6)]
    assert names.knows_digest("da")
    assert names.use("a") is None
    assert names.put(entry("a", "da", 6), "") is names.use("a")
    assert not names.evicted


def test_names_of_the_operator_are_counted(names):
    for name in "ab":
        names.check_explicit()
        names.put(entry(name, f"d{name}", 1), "")
    with pytest.raises(RegistryBusy, match="max_adapters=2; unload one"):
        names.check_explicit()
    with pytest.raises(RegistryBusy, match="unload one"):
        names.make_name("c", ())
