"""The host writes the table as programs do, when the steps that could read it have been read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.host_copier import HostCopier
from lora_jax.adapters.host_table import HostTable
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.row_copies import LoraCopyJob
from lora_jax.adapters.slots import clear_slots, init_slots, publish, size_slots

CATALOGUE = cases.moe(layers=2)
DTYPE = jnp.dtype("float32")


def make():
    spec = size_slots(CATALOGUE, 3, 4, DTYPE.itemsize)
    allocator = SlotAllocator(CATALOGUE, spec.num_slots, spec.rows, DTYPE.itemsize)
    return init_slots(CATALOGUE, spec, DTYPE), allocator


def addresses(slots):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(slots)]


@pytest.mark.parametrize("brings", [False, True])
def test_entries_are_those_that_programs_write(brings):
    found = []
    for by_host in (True, False):
        slots, allocator = make()
        if brings:
            slots = dataclasses.replace(slots, token_ids=jnp.full((2, 3, 4), 9, jnp.int32))
        first, second = (allocator.place(cases.weights(CATALOGUE, 4, seed=n)) for n in (1, 2))
        second = dataclasses.replace(second, token_ids=np.arange(8, dtype=np.int32).reshape(2, 4))
        if by_host:
            table, before = HostTable(), addresses(slots)
            table.publish(slots, first if not brings else second)
            table.publish(slots, second)
            table.clear(slots, (0, 2))
            assert addresses(slots) == before
        else:
            slots = publish(publish(slots, first if not brings else second), second)
            slots = clear_slots(slots, (0, 2))
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(slots)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any(leaf.any() for leaf in found[0])


def test_a_load_writes_nothing_before_the_steps_sent_earlier_have_been_read():
    """A step may use the slot, and the rows, of an adapter that has just left."""
    slots, allocator = make()
    entries = slots.entries.at[:, :, 1].set(3)
    slots = dataclasses.replace(slots, entries=entries)
    table, before = HostTable(), addresses(slots)
    placement = allocator.place(cases.weights(CATALOGUE, 4))
    placement = dataclasses.replace(placement, cleared_slots=(1,))
    job = LoraCopyJob(placement, slots, HostCopier(), table=table)
    table.note(dispatched=5, read=3)
    whole = job.remaining
    slots = job.advance(slots, 1000)
    table.note(dispatched=6, read=4)
    slots = job.advance(slots, 1000)
    assert job.remaining == whole
    assert not any(np.asarray(pool).any() for pool in slots.pools.values())
    assert np.asarray(slots.entries)[:, :, 1].all()
    table.note(dispatched=6, read=5)
    while not job.done:
        slots = job.advance(slots, 1000)
    assert addresses(slots) == before, "no program has made new arrays"
    assert all(np.asarray(pool).any() for pool in slots.pools.values())
    assert np.asarray(slots.entries)[:, :, placement.slot].any()
    assert not np.asarray(slots.entries)[:, :, 1].any()


def test_a_load_of_an_idle_engine_begins_at_once():
    slots, allocator = make()
    table = HostTable()
    table.note(dispatched=7, read=7)
    job = LoraCopyJob(
        allocator.place(cases.weights(CATALOGUE, 4)), slots, HostCopier(), table=table
    )
    job.advance(slots, 1000)
    assert job.done
