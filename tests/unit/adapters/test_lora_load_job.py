"""Writes of a load that are told to another process give the same slots there."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
from support.cases import adapter_cases as cases

from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.lora_load_job import LoraLoadJob, SlotEntry, write
from lora_jax.adapters.slots import init_slots, size_slots

CATALOGUE = cases.moe(layers=2)


def test_told_writes_do_what_the_job_does():
    """The last adapter takes the place of two others, whose entries are emptied too."""
    spec = size_slots(CATALOGUE, 3, 2, 4)
    mine, other = (init_slots(CATALOGUE, spec, jnp.dtype("float32")) for _ in range(2))
    allocator = SlotAllocator(CATALOGUE, spec.num_slots, spec.rows, 4)
    told = []
    for rank, seed in ((2, 0), (2, 1), (2, 2), (4, 9)):
        weights = cases.weights(CATALOGUE, rank, seed)
        job = LoraLoadJob(allocator.place(weights), mine, told.append)
        while not job.done:
            mine = job.advance(mine, 2)
        allocator.finish_loading(weights.digest)
    assert any(isinstance(what, SlotEntry) and what.entries is None for what in told)
    for what in told:
        other = write(other, pickle.loads(pickle.dumps(what)))
    for one, another in zip(*map(jax.tree.leaves, (mine, other)), strict=True):
        np.testing.assert_array_equal(one, another)
    assert np.asarray(mine.entries).any()
