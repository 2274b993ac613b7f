"""Adapters on the device: chunks arrive whole, in order, without compiling, and bounded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.local_widths import LocalWidths
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.lora_load_job import LoraLoadJob
from lora_jax.adapters.slots import (
    chunk_rows,
    clear_slots,
    init_slots,
    size_slots,
    warm_up,
    write_rows,
    write_slot,
)
from lora_jax.sharding import Split, make_mesh

CATALOGUE = cases.moe(layers=2)


def make(num_slots=2, max_rank=4, dtype=jnp.float32):
    spec = size_slots(CATALOGUE, num_slots, max_rank, jnp.dtype(dtype).itemsize)
    return init_slots(CATALOGUE, spec, jnp.dtype(dtype)), SlotAllocator(
        CATALOGUE, spec.num_slots, spec.rows, jnp.dtype(dtype).itemsize
    )


def delta(slots, catalogue, name, layer, slot, expert) -> np.ndarray:
    """Return scaling * B^T A of one site as the device has it."""
    entry = np.asarray(slots.entries)[catalogue.module_names.index(name), layer, slot]
    scaling = np.asarray(slots.scaling)[catalogue.module_names.index(name), layer, slot]
    module = catalogue.modules[name]
    a = np.asarray(slots.pools[str(module.d_in)]).astype(np.float32)
    b = np.asarray(slots.pools[str(module.d_out)]).astype(np.float32)
    a = a[entry[0] + expert * entry[3] :][: entry[2]]
    b = b[entry[1] + expert * entry[4] :][: entry[2]]
    return scaling * b.T @ a


def load(slots, allocator, weights, chunks=3):
    job = LoraLoadJob(allocator.place(weights), slots)
    while not job.done:
        before = job.remaining
        slots = job.advance(slots, chunks)
        assert before - job.remaining == min(chunks, before)
    allocator.finish_loading(weights.digest)
    return slots, job.slot


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("folder", ["0.21.2-deepseek_v2-everything", "hand-mixtral-shared_outer"])
def test_device_deltas_are_the_files(folder, dtype):
    catalogue = cases.deepseek_v2() if "deepseek" in folder else cases.moe()
    weights = peft_format.read(cases.FIXTURES / folder, catalogue)
    spec = size_slots(catalogue, 1, 2, 4)
    allocator = SlotAllocator(catalogue, 1, spec.rows)
    slots, slot = load(init_slots(catalogue, spec, jnp.dtype(dtype)), allocator, weights)
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    for (name, layer), site in weights.sites.items():
        for expert in range(max(catalogue.modules[name].num_experts, 1)):
            full = cases.site_delta(site)
            want = full[expert if full.shape[0] > 1 else 0]
            got = delta(slots, catalogue, name, layer, slot, expert)
            np.testing.assert_allclose(got, want, atol=tolerance)


@pytest.mark.parametrize("chunks", [1, 3])
def test_every_device_s_rows_are_its_part(chunks):
    """Written and read back on two devices: the parts together are the adapter."""
    split = Split(make_mesh(2), "ep")
    catalogue = cases.moe(experts=4, layers=2)
    widths = LocalWidths(2, whole_experts=True, vocab_multiple=2)
    local = widths.catalogue(catalogue)
    spec = size_slots(local, 2, 4, 4)
    allocator = SlotAllocator(catalogue, 2, spec.rows)
    slots = warm_up(init_slots(local, spec, jnp.dtype(jnp.float32), split))
    for seed in (0, 1):
        weights = cases.weights(catalogue, 3 + seed, seed=seed)
        slots, slot = load(slots, allocator, widths.adapter(weights, catalogue), chunks)
        for device in range(2):
            own = dataclasses.replace(
                slots, pools={k: pool.addressable_data(device) for k, pool in slots.pools.items()}
            )
            for (name, layer), site in weights.sites.items():
                module, full = local.modules[name], cases.site_delta(site)
                for expert in range(max(module.num_experts, 1)):
                    want = full[device * module.num_experts + expert]
                    got = delta(own, local, name, layer, slot, expert)
                    if len(got) < len(want):
                        want = want[device * len(got) : (device + 1) * len(got)]
                    np.testing.assert_allclose(got, want, atol=1e-6)


def test_half_loaded_adapters_are_never_in_the_table():
    slots, allocator = make()
    weights = cases.weights(CATALOGUE, 4)
    job = LoraLoadJob(allocator.place(weights), slots)
    total = job.remaining
    for left in range(total - 1, 0, -1):
        slots = job.advance(slots, 1)
        assert job.remaining == left
        assert not np.asarray(slots.entries).any()
        assert not np.asarray(slots.scaling).any()
    slots = job.advance(slots, 1)
    assert job.done
    assert np.asarray(slots.entries)[..., job.slot, 2].all()
    same = job.advance(slots, 5)
    assert same is slots


def test_two_adapters_do_not_disturb_each_other_and_eviction_zeroes():
    slots, allocator = make(num_slots=2)
    first, second = (cases.weights(CATALOGUE, rank, rank) for rank in (2, 3))
    slots, one = load(slots, allocator, first)
    slots, two = load(slots, allocator, second)
    for weights, slot in ((first, one), (second, two)):
        for (name, layer), site in weights.sites.items():
            got = delta(slots, CATALOGUE, name, layer, slot, 0)
            np.testing.assert_allclose(got, cases.site_delta(site)[0], rtol=1e-5, atol=1e-5)
    allocator.retire(first.digest)
    slots = clear_slots(slots, allocator.take_cleared_slots())
    assert not np.asarray(slots.entries)[:, :, one].any()
    assert np.asarray(slots.entries)[:, :, two].any()


def test_slots_freed_by_eviction_are_zeroed_by_the_next_load():
    slots, allocator = make(num_slots=3, max_rank=2)
    small = [cases.weights(CATALOGUE, 2, seed) for seed in range(3)]
    for weights in small:
        slots, _ = load(slots, allocator, weights)
    placement = allocator.place(cases.weights(CATALOGUE, 4, 9))
    assert len(placement.evicted) == 2
    job = LoraLoadJob(placement, slots)
    slots = job.advance(slots, 1)
    (cleared,) = placement.cleared_slots
    assert not np.asarray(slots.entries)[:, :, cleared].any()


def test_nothing_compiles_after_warm_up():
    slots, allocator = make(num_slots=4)
    slots = warm_up(slots)
    jax.block_until_ready(slots)
    sizes = write_rows._cache_size(), write_slot._cache_size()
    for seed, rank in enumerate((1, 4, 2, 3, 4)):
        slots, _ = load(slots, allocator, cases.weights(CATALOGUE, rank, seed), chunks=seed + 1)
    allocator.retire(cases.weights(CATALOGUE, 4, 4).digest)
    slots = clear_slots(slots, allocator.take_cleared_slots())
    assert (write_rows._cache_size(), write_slot._cache_size()) == sizes


def test_programs_that_write_rows_are_compiled_where_programs_write_them():
    spec = make(num_slots=3, max_rank=5)[0]  # shapes of no other test
    before = write_rows._cache_size()
    slots = warm_up(warm_up(spec, rows="copier"), rows="pool")
    assert write_rows._cache_size() == before
    warm_up(slots)
    assert write_rows._cache_size() > before


@pytest.mark.parametrize("rows", ["programs", "copier", "pool"])
def test_warm_up_changes_nothing(rows):
    slots, allocator = make()
    slots, _ = load(slots, allocator, cases.weights(CATALOGUE, 3))
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(slots)]
    after = jax.tree.leaves(warm_up(slots, rows=rows))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_rows_longer_than_a_chunk_arrive_in_several():
    catalogue = cases.llama(hidden=16, inner=6, layers=40)
    spec = size_slots(catalogue, 1, 7, 4)  # 7: matrices straddle the chunks' ends
    allocator, weights = SlotAllocator(catalogue, 1, spec.rows), cases.weights(catalogue, 7)
    assert weights.rows_by_width()[16] > 2 * chunk_rows(16, 4)
    empty = init_slots(catalogue, spec, jnp.dtype(jnp.float32))
    job_size = LoraLoadJob(allocator.place(weights), empty).remaining
    rows = weights.rows_by_width()
    assert job_size == 1 + sum(-(-n // chunk_rows(w, 4)) for w, n in rows.items())
    allocator.abandon_loading(weights.digest)
    slots, slot = load(empty, allocator, weights)
    for layer in range(40):
        got = delta(slots, catalogue, "up_proj", layer, slot, 0)
        want = cases.site_delta(weights.sites["up_proj", layer])[0]
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_chunk_is_bounded_in_rows_and_bytes():
    assert chunk_rows(8, 4) == 512
    assert chunk_rows(4096, 2) == 128
    assert chunk_rows(1 << 22, 4) == 1


def test_a_budget_holds_twice_the_adapters_in_8_bits():
    catalogue = cases.llama(hidden=512)
    spec = {item: size_slots(catalogue, 100, 8, item, byte_budget=1 << 20) for item in (1, 2)}
    rows = {item: sum(of.rows.values()) for item, of in spec.items()}
    assert 1.9 * rows[2] < rows[1] < 2 * rows[2]
    slots = init_slots(catalogue, spec[1], jnp.dtype(jnp.int8))
    assert sum(pool.nbytes for pool in slots.pools.values()) <= 1 << 20
    allocator = SlotAllocator(catalogue, 1, spec[1].rows, 1)
    assert allocator.stats().bytes_total == sum(pool.nbytes for pool in slots.pools.values())


def test_rows_in_8_bits_arrive_as_they_are():
    weights = cases.weights(CATALOGUE, 3).in_8_bits()
    spec = size_slots(CATALOGUE, 1, 4, 1)
    allocator = SlotAllocator(CATALOGUE, 1, spec.rows, 1)
    slots, slot = load(init_slots(CATALOGUE, spec, jnp.dtype(jnp.int8)), allocator, weights)
    index = CATALOGUE.module_names.index("q_proj")
    a_offset, b_offset, rank = np.asarray(slots.entries[index, 0, slot])[:3]
    site = weights.sites["q_proj", 0]
    for offset, matrix in ((a_offset, site.a[0]), (b_offset, site.b[0])):
        pool = slots.pools[str(matrix.shape[1] - 16)]
        np.testing.assert_array_equal(pool[offset : offset + rank], matrix)
