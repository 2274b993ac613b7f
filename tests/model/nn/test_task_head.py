"""Heads of several adapters in one batch: numpy's logits, and a row's own bits."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases as cases
from support.cases.head_cases import write_head

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.lora_load_job import LoraLoadJob
from lora_jax.adapters.slots import init_slots, size_slots
from lora_jax.adapters.task_head import head_logits as numpy_logits
from lora_jax.adapters.task_head import with_head
from lora_jax.nn.task_head import head_logits

CATALOGUE = with_head(cases.llama(), 16, 70)
LABELS = (3, 70, 1)


@pytest.fixture(scope="module", params=["float32", "int8"])
def headed(request, tmp_path_factory):
    """Slots with three heads, their weights and biases, and how far off logits may be."""
    dtype = jnp.dtype(request.param)
    rng, heads = np.random.default_rng(1), []
    spec = size_slots(CATALOGUE, 4, 2, dtype.itemsize)
    allocator = SlotAllocator(CATALOGUE, spec.num_slots, spec.rows, dtype.itemsize)
    slots = init_slots(CATALOGUE, spec, dtype)
    for place, count in enumerate(LABELS):
        folder = tmp_path_factory.mktemp(f"head{place}")
        heads.append((rng.normal(size=(count, 16)).astype("f4"), rng.normal(size=count)))
        write_head(folder, [str(n) for n in range(count)], *heads[-1])
        weights = peft_format.read(folder, CATALOGUE)
        placement = allocator.place(weights.in_8_bits() if dtype == jnp.int8 else weights)
        assert placement.slot == place
        job = LoraLoadJob(placement, slots)
        while not job.done:
            slots = job.advance(slots, 100)
    return slots, heads, 0.2 if dtype == jnp.int8 else 1e-5


def of_rows(slots, states, owners):
    names = CATALOGUE.module_names
    owners = jnp.asarray(owners, jnp.int32)
    return np.asarray(head_logits(jnp.asarray(states), owners, slots, names, 128))


def test_rows_of_several_heads_and_of_none(headed):
    slots, heads, atol = headed
    states = np.random.default_rng(2).normal(size=(7, 16)).astype("f4")
    owners = [1, -1, 0, 2, 1, -1, 0]
    got = of_rows(slots, states, owners)
    for row, owner in enumerate(owners):
        count = 0 if owner < 0 else LABELS[owner]
        assert not got[row, count:].any()
        if owner >= 0:
            weight, bias = heads[owner]
            want = numpy_logits(states[row], weight, bias.astype("f4"))
            np.testing.assert_allclose(got[row, :count], want, rtol=1e-5, atol=atol)
            alone = np.zeros_like(states)
            alone[3] = states[row]
            only = of_rows(slots, alone, [-1, -1, -1, owner, -1, -1, -1])
            np.testing.assert_array_equal(only[3], got[row])
