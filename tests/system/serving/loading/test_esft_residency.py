"""ESFT adapters: their slots follow others', and their memory comes back late."""

from types import SimpleNamespace

from support.doubles.residency_doubles import ESFT, LAST, OneStep, Room, Slots, device
from support.drivers.registry_changes import follow

from serving.loading.adapter_loader import AdapterLoader
from serving.loading.esft_residency import EsftResidency


class Case:
    def __init__(self, slots=1):
        self.room, self.slots, self.device = Room(), Slots(slots), device()
        self.esft = EsftResidency(AdapterLoader(self.slots, OneStep), self.room, 2)

    def advance(self):
        return self.esft.advance(self.device, 10, 4, 3)


def test_slots_follow_and_tables_are_written():
    case = Case()
    case.esft.retain(ESFT)
    assert case.esft.acquire(ESFT.digest) is None
    assert case.advance() == []
    assert (case.device.slots, case.device.reroute_tables) == ((), (ESFT.digest,))
    assert case.room.told == [(4, 3)]
    assert case.esft.acquire(ESFT.digest) == 2
    snapshot = case.esft.snapshot
    assert (snapshot.resident, snapshot.expert_page_bytes) == ({ESFT.digest}, 77)


def test_named_adapters_come_in_when_a_place_has_become_free():
    case = Case()
    follow(case.esft, [ESFT, LAST])
    case.advance()
    case.slots.evict_idle()
    case.slots.place(SimpleNamespace(digest="in the way"))
    case.advance()
    assert not case.esft.is_busy  # nothing was freed: nobody looked
    case.slots.abandon_loading("in the way")
    case.room.freed = 1
    case.advance()
    assert case.esft.snapshot.resident == {ESFT.digest}


def test_busy_while_anything_waits_to_be_freed():
    case = Case()
    assert not case.esft.is_busy
    case.room.is_busy = True
    assert case.esft.is_busy
    case.esft.rest()
    case.esft.close()
    assert (case.room.trimmed, case.room.closed) == (1, 1)
