"""Host memory: what is evicted for an adapter, and when its request waits or is refused."""

import pytest
from support.cases.host_entries import entry

from lora_jax.adapters.entries import RegistryLimits
from lora_jax.adapters.host_memory.room import HostShare
from lora_jax.adapters.host_memory.tier import HostTier
from lora_jax.adapters.host_memory.use_ledger import UseLedger
from lora_jax.adapters.registry_errors import AdapterRejected, HostFull

NEW = entry("new", "n", 4)


class Host:
    """A tier of ten bytes, its clock and the digests that requests need."""

    def __init__(self, *entries):
        self.now, self.used = 0.0, set()
        self.tier = HostTier(UseLedger(), RegistryLimits(max_total_bytes=10), lambda: self.now)
        self.tier.set_in_use(lambda: self.used)
        for one in entries:
            self.tier.copies.add(one)

    def victims(self, ticket=None, new=NEW):
        return self.tier.victims(new, HostShare(), self.tier.staying(), ticket)


def test_what_requests_need_and_callers_hold_stays():
    a, b = entry("a", "da", 4), entry("b", "db", 4)
    host = Host(a, b)
    with host.tier.line.ticket(lambda: None) as ticket:
        held = host.tier.given(b, ticket)
        assert host.victims() == ["a"]
        host.used = {"da"}
        with pytest.raises(HostFull, match="Adapter 'new': adapters in use take all host memory"):
            host.victims(ticket)
        assert len(host.tier.line) == 1
        host.tier.handed_in(held)
        assert host.victims(ticket) == ["b"]
        host.used = {"da", "db"}
        assert held.digest == "db"


def test_an_entry_without_a_ticket_or_of_a_sum_is_not_held():
    b = entry("b", "db", 4)
    host = Host(b)
    with host.tier.line.ticket(lambda: None, lends=False) as ticket:
        assert host.tier.given(b, ticket) is host.tier.given(b, None) is b
    assert host.tier.staying().in_use == frozenset()


def test_a_request_waits_behind_an_earlier_one_though_there_is_room():
    host = Host()
    tickets = [host.tier.line.ticket(lambda: None, deadline=d) for d in (1, 2)]
    with tickets[0] as first, tickets[1] as second:
        host.tier.take_turn("a", second)
        host.tier.line.enter(first, "a")
        host.tier.take_turn("a", None)
        with pytest.raises(HostFull):
            host.tier.take_turn("b", second)
        host.tier.line.leave(first)
        host.tier.take_turn("b", second)


def test_a_patient_request_closes_what_would_go_for_it():
    a, b = entry("a", "da", 5), entry("b", "db", 5)
    host = Host(a, b)
    host.used = {"da", "db"}
    host.tier.copies._ledger.used("db")  # which is worth more
    options = {"wait_s": 2.0}
    with (
        host.tier.line.ticket(lambda: None, **options) as first,
        host.tier.line.ticket(lambda: None, **options) as later,
    ):
        for host.now in (1.0, 2.0):
            host.tier.check_open(a, later)
            with pytest.raises(HostFull):
                host.victims(first)
        with pytest.raises(HostFull, match="Adapter 'a'"):
            host.tier.check_open(a, later)
        host.tier.check_open(b, later)
        host.tier.check_open(a, None)


def test_what_does_not_fit_beside_pinned_adapters_is_refused_with_what_to_change():
    host = Host(entry("a", "da", 7, pinned=True))
    with pytest.raises(AdapterRejected, match=r"'new': it takes 4 bytes .* unload a pinned") as no:
        host.victims()
    assert not isinstance(no.value, HostFull)
    assert "max_total_adapter_bytes" in str(no.value)


def test_what_is_being_read_may_fail_so_that_there_is_room():
    host = Host()
    host.tier.copies.hold(entry("a", "da", 7))
    with pytest.raises(HostFull):
        host.victims()
