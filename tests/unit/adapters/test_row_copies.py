"""Rows that the host copies are those that programs write, and nobody sees half of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases as cases
from support.doubles.late_copier import LateCopier

from lora_jax.adapters import row_copies
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.row_copies import LoraCopyJob
from lora_jax.adapters.slots import LoraLoadJob, init_slots, size_slots

CATALOGUE = cases.moe(layers=2)


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
    assert copier.log[0] == copier.log[-1] == "finish"  # what was given up, then what was begun


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
    monkeypatch.setattr(row_copies, "_have_ended", lambda slots: False)
    for _ in range(3):
        slots = job.advance(slots, 1000)
        assert job.remaining == whole
    assert copier.log == ["finish"]
    monkeypatch.setattr(row_copies, "_have_ended", lambda slots: True)
    slots = job.advance(slots, 1000)
    assert copier.log[1] == "begin"
