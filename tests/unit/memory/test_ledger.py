"""Books of reservations, pages and mappings: what they find and what they refuse."""

import re

import pytest

from lora_jax.memory.ledger import AddressLedger
from lora_jax.memory.virtual import Access, MappingError

BASE = 1 << 20


@pytest.fixture
def ledger() -> AddressLedger:
    """Two reservations, one right behind the other, of 8 units of 16 bytes; four pages."""
    books = AddressLedger(16)
    books.record_reservation(BASE, 128)
    books.record_reservation(BASE + 128, 128)
    for handle in range(3):
        books.record_page(handle, 16)
    books.record_page(3, 32, imported=True)
    return books


def test_a_run_may_not_cross_into_the_next_reservation(ledger):
    ledger.check_map(BASE + 112, [0], 16)
    ledger.check_map(BASE + 128, [0], 16)
    with pytest.raises(MappingError, match="outside every reservation"):
        ledger.check_map(BASE + 112, [0, 1], 32)
    ledger.forget_reservation(BASE)
    with pytest.raises(MappingError, match="outside every reservation"):
        ledger.check_map(BASE + 112, [0], 16)


def test_pages_of_several_sizes_lie_behind_one_another(ledger):
    assert ledger.check_map(BASE, [0, 1], 32) is Access.READ_WRITE
    ledger.record_page(9, 48)
    assert ledger.check_map(BASE, [0, 9, 1], 80) is Access.READ_WRITE
    assert ledger.places(BASE, [0, 9, 1]) == [(BASE, 16, 0), (BASE + 16, 48, 9), (BASE + 64, 16, 1)]
    with pytest.raises(MappingError, match=re.escape("pages [0, 9] have 64 bytes, not 32")):
        ledger.check_map(BASE, [0, 9], 32)


def test_mappings_that_share_a_byte_are_found(ledger):
    ledger.record_mapping(BASE + 32, 3, Access.READ)  # 32 bytes
    for offset in (32, 48):
        with pytest.raises(MappingError, match=re.escape(f"{BASE + 32:#x} + 32")):
            ledger.check_map(BASE + offset, [0], 16)
    with pytest.raises(MappingError, match="mapped already"):
        ledger.check_map(BASE + 16, [0, 1], 32)
    ledger.check_map(BASE + 16, [0], 16)
    ledger.check_map(BASE + 64, [0], 16)


def test_a_gap_is_named(ledger):
    for i, offset in enumerate((0, 16, 48)):
        ledger.record_mapping(BASE + offset, i, Access.READ_WRITE)
    assert [m.handle for m in ledger.find_mappings("x", BASE, 32)] == [0, 1]
    with pytest.raises(MappingError, match=f"not mapped at {BASE + 32:#x}"):
        ledger.find_mappings("x", BASE, 64)
    with pytest.raises(MappingError, match="cuts"):
        ledger.find_mappings("x", BASE + 8, 8)


def test_bytes_are_counted_by_page_and_by_mapping(ledger):
    assert ledger.created_bytes == 48
    ledger.record_mapping(BASE, 3, Access.READ)
    ledger.record_mapping(BASE + 64, 3, Access.READ)
    assert ledger.mapped_bytes == 64
    ledger.forget_mapping(BASE)
    with pytest.raises(MappingError, match="still mapped at 1"):
        ledger.check_unused(3)
    ledger.forget_mapping(BASE + 64)
    ledger.check_unused(3)


def test_own_pages_are_writable_and_imported_ones_are_not(ledger):
    ledger.record_page(9, 32)
    assert ledger.check_map(BASE, [0, 1], 32) is Access.READ_WRITE
    assert ledger.check_map(BASE, [3], 32) is Access.READ
    with pytest.raises(MappingError, match="own and imported"):
        ledger.check_map(BASE, [9, 3], 64)
    ledger.record_mapping(BASE, 3, Access.READ)
    assert len(ledger.check_protect(BASE, 32, Access.NONE)) == 1
    with pytest.raises(MappingError, match="page 3 is imported"):
        ledger.check_protect(BASE, 32, Access.READ_WRITE)


def test_copies_need_the_access(ledger):
    ledger.record_mapping(BASE, 0, Access.READ_WRITE)
    ledger.record_mapping(BASE + 16, 1, Access.READ_WRITE)
    ledger.record_access(BASE + 16, Access.READ)
    ledger.check_access("copy", BASE, 32, Access.READ, Access.READ_WRITE)
    ledger.check_access("copy", BASE, 16, Access.READ_WRITE)
    with pytest.raises(MappingError, match=f"{BASE + 16:#x} \\+ 16 has access READ"):
        ledger.check_access("copy", BASE, 32, Access.READ_WRITE)


def test_a_reservation_is_released_whole_and_empty(ledger):
    ledger.record_mapping(BASE + 128, 0, Access.READ_WRITE)
    ledger.check_release(BASE, 128)
    with pytest.raises(MappingError, match=f"mapped at {BASE + 128:#x}"):
        ledger.check_release(BASE + 128, 128)
    for address, size in ((BASE, 256), (BASE + 16, 112), (BASE, 64)):
        with pytest.raises(MappingError, match="no reservation"):
            ledger.check_release(address, size)
