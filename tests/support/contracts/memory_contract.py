"""The tests that every virtual memory must pass; a test file derives a class from the contract.

The file gives a fixture `memory`, in which nothing is reserved or created yet.
"""

import contextlib
import os

import jax.numpy as jnp
import numpy as np
import pytest
from support.processes.process_facts import open_files

from lora_jax.memory.pool import PagePool
from lora_jax.memory.virtual import AbstractVirtualMemory, Access, MappingError, OutOfPages
from lora_jax.memory.weight_tensor import WeightTensor


def bytes_of(count: int, seed: int) -> np.ndarray:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def small_tensor(memory: AbstractVirtualMemory, experts: int = 40) -> WeightTensor:
    """A tensor whose experts are 2.75 pages long, with a pool of 60 pages."""
    page = memory.granularity
    pool = PagePool(memory, page_bytes=page, budget_bytes=60 * page)
    return WeightTensor(pool, (experts, 11, page // 16), np.dtype(np.float32))


class VirtualMemoryContract:
    """Reserve, create, map, protect, copy: what works, and what is refused without a trace."""

    @pytest.fixture
    def page(self, memory):
        return memory.granularity

    @pytest.fixture
    def place(self, memory, page):
        """Eight pages of address space, given back with all that the test mapped there."""
        address = memory.reserve(8 * page)
        yield address
        for i in range(8):
            with contextlib.suppress(MappingError):
                memory.unmap(address + i * page, page)
        memory.release(address, 8 * page)

    @pytest.fixture
    def pages(self, memory, page):
        """Four pages; taken after `place` in every test, so given back before it."""
        return [memory.create_page(page) for _ in range(4)]

    @pytest.fixture(autouse=True)
    def _nothing_is_left(self, memory):
        yield
        memory_pages = list(memory._ledger.pages)
        for handle in memory_pages:
            memory.destroy_page(handle)
        assert (memory.usage().created, memory.usage().mapped) == (0, 0)

    def test_bytes_lie_behind_one_another_over_pages(self, memory, place, pages, page):
        memory.map_run(place + page, pages[:3], 3 * page)
        data = bytes_of(2 * page, 0)
        memory.write(place + page + page // 2, data)
        assert memory.read(place + page + page // 2, 2 * page) == data.tobytes()
        assert memory.usage().mapped == 3 * page
        assert memory.usage().created == 4 * page

    def test_writes_that_were_begun_are_there_when_they_are_finished(
        self, memory, place, pages, page
    ):
        memory.map_run(place, pages, 4 * page)
        data = [bytes_of(page // 2 + 7 * n, n) for n in range(5)]
        ends = np.cumsum([len(values) for values in data]).tolist()
        for values, end in zip(data, ends, strict=True):
            memory.begin_write(place + end - len(values), values)
        memory.finish_writes()
        assert memory.read(place, ends[-1]) == b"".join(values.tobytes() for values in data)
        memory.finish_writes()  # nothing was begun
        with pytest.raises(MappingError, match="is not mapped"):
            memory.begin_write(place + 4 * page, data[0])

    def test_a_page_keeps_its_bytes_when_it_moves(self, memory, place, pages, page):
        memory.map(place, pages[0], page)
        data = bytes_of(page, 1)
        memory.write(place, data)
        memory.unmap(place, page)
        memory.map(place + 5 * page, pages[0], page)
        assert memory.read(place + 5 * page, page) == data.tobytes()

    def test_one_page_at_two_addresses(self, memory, place, pages, page):
        memory.map(place, pages[0], page)
        memory.map(place + 7 * page, pages[0], page)
        memory.write(place, bytes_of(16, 2))
        assert memory.read(place + 7 * page, 16) == bytes_of(16, 2).tobytes()
        memory.unmap(place, page)
        with pytest.raises(MappingError, match="still mapped at 1"):
            memory.destroy_page(pages[0])

    def test_values_of_any_layout_are_written_in_c_order(self, memory, place, pages, page):
        memory.map(place, pages[0], page)
        values = np.arange(12, dtype=np.float32).reshape(3, 4).T
        memory.write(place, values)
        assert memory.read(place, 48) == values.tobytes()

    def test_an_array_of_the_device_is_copied(self, memory, place, pages, page):
        memory.map_run(place, pages[:2], 2 * page)
        values = jnp.asarray(bytes_of(page, 4).view(np.float32))
        try:
            memory.write_array(place + page // 2, values)
        except NotImplementedError as error:
            pytest.skip(str(error))
        assert memory.read(place + page // 2, page) == np.asarray(values).tobytes()
        with pytest.raises(MappingError, match="not mapped"):
            memory.write_array(place + page + page // 2, values)

    def test_unmap_takes_whole_mappings_only(self, memory, place, pages, page):
        memory.map_run(place, pages[:3], 3 * page)
        for address, size in ((place, page // 2), (place + page // 2, page)):
            with pytest.raises(MappingError, match="cuts"):
                memory.unmap(address, size)
        with pytest.raises(MappingError, match="not mapped"):
            memory.unmap(place, 4 * page)
        assert memory.usage().mapped == 3 * page
        memory.unmap(place + page, 2 * page)
        assert memory.usage().mapped == page
        with pytest.raises(MappingError, match="not mapped"):
            memory.unmap(place + page, page)

    def test_a_run_is_mapped_whole_or_not_at_all(self, memory, place, pages, page):
        memory.map(place + 2 * page, pages[3], page)
        memory.write(place + 2 * page, bytes_of(8, 3))
        with pytest.raises(MappingError, match=f"mapped already at {place + 2 * page:#x}"):
            memory.map_run(place, pages[:3], 3 * page)
        assert memory.usage().mapped == page
        assert memory.read(place + 2 * page, 8) == bytes_of(8, 3).tobytes()
        memory.map_run(place, pages[:2], 2 * page)

    def test_what_does_not_fit_is_refused_by_name(self, memory, place, pages, page):
        big = memory.create_page(2 * page)
        cases = [
            ((place + page // 2, [pages[0]], page), "is not a multiple"),
            ((place, [pages[0]], page // 2), "not a positive multiple"),
            ((place, [big], page), f"have {2 * page} bytes, not {page}"),
            ((place, [pages[0], big], 2 * page), f"have {3 * page} bytes, not {2 * page}"),
            ((place + 7 * page, pages[:2], 2 * page), "outside every reservation"),
            ((place - page, [pages[0]], page), "outside every reservation"),
            ((place, [], page), f"have 0 bytes, not {page}"),
            ((place, [], 0), "0 bytes is not a positive multiple"),
            ((place, [12345678], page), "no page with handle 12345678"),
        ]
        for arguments, said in cases:
            with pytest.raises(MappingError, match=said):
                memory.map_run(*arguments)
        assert memory.usage().mapped == 0

    def test_sizes_are_multiples_of_the_granularity(self, memory, page):
        for call in (memory.reserve, memory.create_page):
            for size in (0, -page, page + 1):
                with pytest.raises(MappingError, match=f"multiple of {page}"):
                    call(size)

    def test_release_wants_an_empty_reservation(self, memory, place, pages, page):
        memory.map(place + 3 * page, pages[0], page)
        with pytest.raises(MappingError, match="has a page mapped"):
            memory.release(place, 8 * page)
        for address, size in ((place, page), (place + page, 7 * page)):
            with pytest.raises(MappingError, match="no reservation"):
                memory.release(address, size)

    def test_copies_stay_within_pages(self, memory, place, pages, page):
        memory.map(place, pages[0], page)
        memory.write(place, bytes_of(page, 4))
        with pytest.raises(MappingError, match="write"):
            memory.write(place + page // 2, bytes_of(page, 5))
        with pytest.raises(MappingError, match="read"):
            memory.read(place + page - 1, 2)
        assert memory.read(place, page) == bytes_of(page, 4).tobytes()

    def test_a_dead_handle_is_refused(self, memory, pages):
        memory.destroy_page(pages[0])
        with pytest.raises(MappingError, match="no page"):
            memory.destroy_page(pages[0])

    def test_pages_of_a_tensor_are_shared_at_borders_and_all_come_back(self, memory, page):
        tensor = small_tensor(memory)
        values = bytes_of(9 * tensor.expert_bytes, 6).view(np.float32).reshape(9, *tensor.shape[1:])
        for first, last in ((0, 4), (4, 7), (7, 9), (20, 23)):
            tensor.map(range(first, last))
        assert tensor.bytes_mapped == (25 + 9) * page  # 24.75 pages, and 8.25 from a border on
        tensor.write(0, values)
        tensor.unmap(range(4, 7))
        for index in (*range(4), 7, 8):
            at = tensor.address + index * tensor.expert_bytes
            assert memory.read(at, tensor.expert_bytes) == values[index].tobytes()
        tensor.check_integrity()
        tensor.close()
        assert tensor.pool.stats().in_use == 0
        assert tensor.pool.trim() == 34 * page


class SharingContract:
    """What export and import do, for memories whose pages have file descriptors."""

    def test_an_imported_page_shows_the_same_bytes_and_cannot_be_written(self, memory):
        page = memory.granularity
        address, own = memory.reserve(2 * page), memory.create_page(page)
        memory.map(address, own, page)
        memory.write(address, bytes_of(page, 7))
        files = open_files()
        fd = memory.export_fd(own)
        imported = memory.import_fd(fd, page)
        os.close(fd)
        memory.map(address + page, imported, page)
        assert memory.read(address + page, page) == bytes_of(page, 7).tobytes()
        assert memory.usage().created == page
        with pytest.raises(MappingError, match="READ"):
            memory.write(address + page, bytes_of(8, 8))
        with pytest.raises(MappingError, match="read-only"):
            memory.protect(address + page, page, Access.READ_WRITE)
        other = memory.create_page(page)
        memory.unmap(address, 2 * page)
        with pytest.raises(MappingError, match="own and imported"):
            memory.map_run(address, [other, imported], 2 * page)
        for handle in (imported, other):
            memory.destroy_page(handle)
        assert open_files() <= files
        memory.destroy_page(own)
        memory.release(address, 2 * page)

    def test_access_can_be_taken_and_given(self, memory):
        page = memory.granularity
        address, own = memory.reserve(page), memory.create_page(page)
        memory.map(address, own, page)
        memory.write(address, bytes_of(page, 9))
        memory.protect(address, page, Access.READ)
        with pytest.raises(MappingError, match="READ"):
            memory.write(address, bytes_of(8, 8))
        assert memory.read(address, page) == bytes_of(page, 9).tobytes()
        memory.protect(address, page, Access.NONE)
        with pytest.raises(MappingError, match="NONE"):
            memory.read(address, 1)
        memory.protect(address, page, Access.READ_WRITE)
        memory.write(address, bytes_of(page, 10))
        memory.unmap(address, page)
        memory.destroy_page(own)
        memory.release(address, page)


class DriverDoubleContract:
    """What happens when the driver refuses; the file gives `memory` and `double`.

    See driver_double.Double.
    """

    @pytest.mark.parametrize("after", [0, 1, 2])
    def test_a_failure_in_the_middle_of_a_load_undoes_all_of_it(self, memory, double, after):
        for operation in ("create", "map", "grant"):
            if operation in double.operations:
                self._fail_a_load(memory, double, operation, after)
        assert double.live() == (0, 0, 0)

    def _fail_a_load(self, memory, double, operation, after):
        """Fail the call number `after` of a load; all is as it was, unless it had no such call."""
        tensor = small_tensor(memory)
        tensor.map(range(0, 2))
        tensor.write(0, np.ones((2, *tensor.shape[1:]), np.float32))
        before = (double.live(), tensor.pool.stats().in_use, tensor.mapped, memory.usage())
        double.fail(operation, after)
        try:
            tensor.map(range(2, 5))
            failed = False
        except MappingError:
            failed = True
        double.fail(operation, -1)
        calls = {"create": 2, "map": 2, "grant": 1}[operation]
        assert failed == (after < calls)
        if failed:
            free = tensor.pool.stats().free
            tensor.pool.trim()
            after_it = (double.live(), tensor.pool.stats().in_use, tensor.mapped, memory.usage())
            assert after_it == before
            assert free in (0, 8)
        at = tensor.address + tensor.expert_bytes
        ones = np.ones(tensor.shape[1:], np.float32).tobytes()
        assert memory.read(at, tensor.expert_bytes) == ones
        tensor.check_integrity()
        tensor.close()
        tensor.pool.trim()

    def test_no_memory_is_out_of_pages(self, memory, double):
        double.fail("create", 0, double.no_memory)
        with pytest.raises(OutOfPages, match=str(double.no_memory)):
            memory.create_page(memory.granularity)

    def test_the_device_can_be_full(self, memory, double):
        double.capacity(3 * memory.granularity)
        tensor = small_tensor(memory)
        tensor.map(range(0, 1))
        assert memory.usage().device_used == 3 * memory.granularity
        with pytest.raises(OutOfPages):
            tensor.map(range(1, 2))
        assert tensor.mapped == (0,)
        tensor.close()
        tensor.pool.trim()
        assert memory.usage().device_used == 0

    def test_a_page_that_the_driver_keeps_stays_with_the_tensor(self, memory, double):
        tensor = small_tensor(memory)
        tensor.map(range(0, 2))
        double.fail("unmap", 1)
        with pytest.raises(MappingError, match="Unmap"):
            tensor.unmap(range(0, 2))
        assert tensor.mapped == ()
        assert tensor.bytes_mapped == memory.granularity
        tensor.check_integrity()
        tensor.map(range(0, 2))
        assert tensor.bytes_mapped == 6 * memory.granularity
        tensor.close()
        tensor.pool.trim()
        assert double.live() == (0, 0, 0)
