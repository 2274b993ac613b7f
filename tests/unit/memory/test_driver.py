"""Books and undo around a driver: which calls it gets, and in which order."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.doubles.faulty_memory import counting_memory

from lora_jax.memory.virtual import Access, MappingError

PAGE = 64


def test_a_run_sets_its_access_in_one_call():
    memory, calls = counting_memory(PAGE)
    address = memory.reserve(6 * PAGE)
    handles = [memory.create_page(count * PAGE) for count in (1, 3, 1)]
    memory.map_run(address, handles, 5 * PAGE)
    assert [(call[0], call[1] - address) for call in calls] == [
        ("map", 0),
        ("map", PAGE),
        ("map", 4 * PAGE),
        ("grant", 0),
    ]
    assert calls[-1] == ("grant", address, 5 * PAGE, Access.READ_WRITE)


def test_mappings_are_taken_one_by_one():
    memory, calls = counting_memory(PAGE)
    address = memory.reserve(2 * PAGE)
    memory.map_run(address, [memory.create_page(PAGE) for _ in range(2)], 2 * PAGE)
    del calls[:]
    memory.unmap(address, 2 * PAGE)
    assert calls == [("unmap", address, PAGE), ("unmap", address + PAGE, PAGE)]


def test_imported_pages_are_granted_for_reading_only():
    memory, calls = counting_memory(PAGE)
    address, handle = memory.reserve(PAGE), memory.import_fd(0, PAGE)
    memory.map(address, handle, PAGE)
    assert calls[-1] == ("grant", address, PAGE, Access.READ)
    assert memory.usage().created == 0


def test_what_the_books_refuse_never_reaches_the_driver():
    memory, calls = counting_memory(PAGE)
    address, handle = memory.reserve(PAGE), memory.create_page(PAGE)
    for call in (
        lambda: memory.map(address + 1, handle, PAGE),
        lambda: memory.unmap(address, PAGE),
        lambda: memory.write(address, np.zeros(4, np.uint8)),
        lambda: memory.read(address, 4),
        lambda: memory.protect(address, PAGE, Access.NONE),
        lambda: memory.release(address, 2 * PAGE),
        lambda: memory.destroy_page(handle + 1),
        lambda: memory.export_fd(handle + 1),
        lambda: memory.import_fd(0, PAGE + 1),
        lambda: memory.array(address, (PAGE,), np.dtype(np.float32)),
    ):
        with pytest.raises(MappingError):
            call()
    assert calls == []


def test_arrays_of_others_are_written_within_their_bounds():
    memory, calls = counting_memory(PAGE)
    array = SimpleNamespace(nbytes=48, unsafe_buffer_pointer=lambda: 4096)
    data = np.arange(8, dtype=np.uint32)
    memory.begin_write_into(array, 16, data)
    memory.finish_writes()
    assert calls[-1] == ("copy_in", 4096 + 16, data.nbytes)
    for offset in (-1, 17):
        with pytest.raises(MappingError, match=f"Bytes {offset} to {offset + 32} are not in an"):
            memory.begin_write_into(array, offset, data)
    assert len(calls) == 1
