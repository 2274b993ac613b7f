"""Rows that the host copies are those that programs write, and nobody sees half of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases as cases
from support.doubles.late_copier import LateCopier

from lora_jax.adapters import row_copies
from lora_jax.adapters.lora_allocator import RowWrite, SlotAllocator
from lora_jax.adapters.lora_load_job import LoadFailed, LoraLoadJob
from lora_jax.adapters.row_copies import LoraCopyJob, joined, pin_matrices
from lora_jax.adapters.slots import init_slots, size_slots

CATALOGUE = cases.moe(layers=2)


@pytest.fixture(autouse=True)
def _wait_for_marks(monkeypatch):
    """Make what a job finds independent of how soon the machine runs a program."""
    monkeypatch.setattr(row_copies, "has_ended", lambda mark: int(mark.block_until_ready()) == 0)


def make(dtype):
    spec = size_slots(CATALOGUE, 2, 4, dtype.itemsize)
    allocator = SlotAllocator(CATALOGUE, spec.num_slots, spec.rows, dtype.itemsize)
    return init_slots(CATALOGUE, spec, dtype), allocator


def load(make_job, dtype, chunks=2):
    slots, allocator = make(dtype)
    for seed, rank in ((1, 4), (2, 3)):
        weights = cases.weights(CATALOGUE, rank, seed=seed)
        job = make_job(allocator.place(weights), slots)
        assert (job.digest, job.slot) == (weights.digest, seed - 1)
        asked = 0
        while not job.done:
            before = job.remaining
            slots = jax.block_until_ready(job.advance(slots, chunks))
            asked += job.remaining == before  # programs ran, only before the first write
            assert job.remaining < before or asked == 1
            assert bool(np.asarray(slots.entries)[:, :, job.slot].any()) == job.done
        allocator.finish_loading(weights.digest)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(slots)]


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_slots_are_those_that_programs_write(name, monkeypatch):
    dtype, copier = jnp.dtype(name), LateCopier()
    monkeypatch.setattr(row_copies, "CHUNK_BYTES", 256)
    want = load(LoraLoadJob, dtype)
    got = load(lambda placement, slots: LoraCopyJob(placement, slots, copier), dtype)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert copier.log.count("begin") > 10
    assert copier.log[-1] == "finish"


def test_slots_that_are_free_are_empty_before_their_rows_are_written():
    slots, allocator = make(jnp.dtype("float32"))
    copier, weights = LateCopier(), cases.weights(CATALOGUE, 4)
    placement = dataclasses.replace(allocator.place(weights), cleared_slots=(1,))
    slots = dataclasses.replace(slots, entries=slots.entries.at[:, :, 1].set(3))
    job = LoraCopyJob(placement, slots, copier)
    slots = job.advance(slots, 1)
    assert not job.done
    assert not np.asarray(slots.entries).any()


def test_only_the_first_part_of_a_placement_waits():
    slots, allocator = make(jnp.dtype("float32"))
    placement, copier = allocator.place(cases.weights(CATALOGUE, 4)), LateCopier()
    job = LoraCopyJob(placement, slots, copier, is_first=False)
    assert job.advance(slots, 0) is slots
    slots = job.advance(slots, 1)
    assert copier.log[0] == "begin"
    while not job.done:
        slots = job.advance(slots, 8)
    assert job.remaining == 0
    assert job.advance(slots, 8) is slots
    assert copier.log.count("finish") == 1


def test_an_adapter_shows_when_all_its_copies_have_arrived():
    slots, allocator = make(jnp.dtype("float32"))
    placement, copier = allocator.place(cases.weights(CATALOGUE, 4)), LateCopier(late=2)
    job = LoraCopyJob(placement, slots, copier)
    num_late = 0
    while not job.done:
        slots = jax.block_until_ready(job.advance(slots, 1000))
        num_late += job.remaining == 1
        assert bool(np.asarray(slots.entries).any()) == job.done
    assert num_late == 2


def test_rows_are_written_when_programs_have_ended_and_nobody_waits_for_them(monkeypatch):
    slots, allocator = make(jnp.dtype("float32"))
    placement, copier = allocator.place(cases.weights(CATALOGUE, 4)), LateCopier()
    job = LoraCopyJob(placement, slots, copier)
    whole = job.remaining
    monkeypatch.setattr(row_copies, "has_ended", lambda mark: False)
    for _ in range(3):
        slots = job.advance(slots, 1000)
        assert job.remaining == whole
    assert not copier.log
    monkeypatch.setattr(row_copies, "has_ended", lambda mark: True)
    slots = job.advance(slots, 1000)
    assert copier.log[0] == "begin"


def test_the_matrices_of_one_width_are_one_copy_and_the_rows_are_the_same():
    weights, copier = cases.weights(CATALOGUE, 4), LateCopier()
    packed = pin_matrices(weights, copier)
    assert copier.log == ["pin"]
    assert pin_matrices(weights, None) is weights
    slots, allocator = make(jnp.dtype("float32"))
    num_widths, want = len(weights.rows_by_width()), None
    for given, copies in ((weights, len(weights.demand)), (packed, num_widths)):
        slots, _ = make(jnp.dtype("float32"))
        job = LoraCopyJob(allocator.place(given), slots, copier)
        allocator.abandon_loading(given.digest)
        copier.log.clear()
        while not job.done:
            slots = job.advance(slots, 1000)
        assert copier.log.count("begin") == copies
        got = [np.asarray(leaf) for leaf in jax.tree.leaves(slots)]
        for one, other in zip(got, want or got, strict=True):
            np.testing.assert_array_equal(one, other)
        want = got


def test_only_rows_that_follow_each_other_here_and_there_are_one_copy():
    block = np.arange(32, dtype=np.float32).reshape(8, 4)
    gap = [RowWrite(0, block[:2]), RowWrite(3, block[2:4])]  # on the device
    far = [RowWrite(0, block[:2]), RowWrite(2, block[3:5])]  # on the host
    back = [RowWrite(2, block[2:4]), RowWrite(0, block[:2])]
    alone = [RowWrite(0, block[:2].copy()), RowWrite(2, block[2:4].copy())]
    wide = [RowWrite(0, block[:2, :2]), RowWrite(2, block[2:4, :2])]
    parts = [RowWrite(0, block[:2]), RowWrite(2, block[2:4].reshape(2, 2, 2))]
    for writes in (gap, far, back, alone, wide, parts):
        assert list(joined(writes)) == writes
    one, other = joined([*gap, RowWrite(5, block[4:8])])
    assert one is gap[0]
    assert other.offset == 3
    np.testing.assert_array_equal(other.rows, block[2:8])
    assert np.shares_memory(other.rows, block)
    assert list(joined([])) == []


def test_several_loads_are_under_way_and_none_waits_for_the_table_of_another(monkeypatch):
    slots, allocator = make(jnp.dtype("float32"))
    copier, jobs = LateCopier(), []
    for seed in (1, 2):
        weights = pin_matrices(cases.weights(CATALOGUE, 4, seed=seed), copier)
        jobs.append(LoraCopyJob(allocator.place(weights), slots, copier))
    copier.log.clear()
    ended, waited = row_copies.has_ended, []
    monkeypatch.setattr(row_copies, "has_ended", lambda mark: waited.append(mark))
    for job in jobs:
        slots = job.advance(slots, 1000)
    assert (len(waited), copier.log) == (2, [])
    monkeypatch.setattr(row_copies, "has_ended", ended)
    for job in jobs:
        slots = job.advance(slots, 1000)
        assert job.done  # though the table of the one before was written meanwhile
    want, plain = make(jnp.dtype("float32"))
    for seed in (1, 2):
        job = LoraLoadJob(plain.place(cases.weights(CATALOGUE, 4, seed=seed)), want)
        want = job.advance(want, 1000)
    for one, other in zip(jax.tree.leaves(slots), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_copy_that_fails_leaves_none_under_way():
    slots, allocator = make(jnp.dtype("float32"))
    copier = LateCopier()
    job = LoraCopyJob(allocator.place(cases.weights(CATALOGUE, 4)), slots, copier, is_first=False)
    begin = copier.begin_write_into

    def second_fails(*given):
        if copier.begun:
            raise OSError("the bus")
        begin(*given)

    copier.begin_write_into = second_fails
    slots = job.advance(slots, 1000)
    with pytest.raises(LoadFailed, match="the bus"):
        job.advance(slots, 1000)
    assert (copier.begun, copier.log) == ([], ["begin", "finish"])
    assert not np.asarray(slots.entries).any()


@pytest.mark.parametrize("call", ["begin_write_into", "writes_done", "finish_writes"])
def test_a_copy_that_fails_in_any_call_leaves_the_slots_to_the_next_load(call, monkeypatch):
    """The fence of a load donates the slots: a failure in the same call would lose them."""
    slots, allocator = make(jnp.dtype("float32"))
    copier, weights = LateCopier(), cases.weights(CATALOGUE, 4)

    def fail(*_):
        raise MemoryError("no pinned memory")

    with monkeypatch.context() as broken:
        broken.setattr(copier, call, fail)
        job = LoraCopyJob(allocator.place(weights), slots, copier)
        slots = job.advance(slots, 1000)
        with pytest.raises(LoadFailed, match="no pinned memory") as caught:
            job.advance(slots, 1000)
    assert not caught.value.may_pass
    allocator.abandon_loading(weights.digest)
    job = LoraCopyJob(allocator.place(weights), slots, copier)
    while not job.done:
        slots = job.advance(slots, 1000)
    assert np.asarray(slots.entries).any()
