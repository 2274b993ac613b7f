"""Rows that the host copies into arrays of a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.host_copier import HostCopier
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.lora_load_job import LoraLoadJob
from lora_jax.adapters.row_copies import Copier, LoraCopyJob, pin_matrices
from lora_jax.adapters.slots import init_slots, size_slots

CATALOGUE = cases.moe(layers=2)


@pytest.mark.parametrize("chunk_bytes", [1, 300, HostCopier.chunk_bytes])
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_slots_are_those_that_programs_write(name, chunk_bytes):
    """Of two adapters, whatever the chunk; no copy is larger than a chunk or one row."""
    dtype, sizes = jnp.dtype(name), []

    class Noting(HostCopier):
        def begin_write_into(self, array, offset, data):
            itemsize = array.dtype.itemsize
            sizes.append((data.size * itemsize, data[:1].size * itemsize))
            super().begin_write_into(array, offset, data)

    def copies(placement, slots):
        return LoraCopyJob(placement, slots, Noting(), chunk_bytes=chunk_bytes)

    found = []
    for make_job in (LoraLoadJob, copies):
        spec = size_slots(CATALOGUE, 2, 4, dtype.itemsize)
        allocator = SlotAllocator(CATALOGUE, spec.num_slots, spec.rows, dtype.itemsize)
        slots = init_slots(CATALOGUE, spec, dtype)
        for seed, rank in ((1, 4), (2, 3)):
            weights = pin_matrices(cases.weights(CATALOGUE, rank, seed=seed), HostCopier())
            job = make_job(allocator.place(weights), slots)
            while not job.done:
                slots = jax.block_until_ready(job.advance(slots, 2))
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(slots)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(size <= max(chunk_bytes, row) for size, row in sizes)


def test_a_copy_stays_inside_the_array():
    copier, array = HostCopier(), jnp.zeros((4, 2), jnp.float32)
    assert isinstance(copier, Copier)
    copier.begin_write_into(array, 8, np.ones((1, 2), np.float32))
    np.testing.assert_array_equal(np.asarray(array)[:, 0], [0, 1, 0, 0])
    copier.begin_write_into(array, 16, np.array([[7, 8]], np.int16))  # as the array's dtype
    np.testing.assert_array_equal(np.asarray(array)[2], [7, 8])
    for offset in (-4, 28):
        with pytest.raises(ValueError, match="are not in an array of 32"):
            copier.begin_write_into(array, offset, np.ones((1, 2), np.float32))
