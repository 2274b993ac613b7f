"""Arrays of constant addresses over pages of one pool: layout, and what has memory."""

import jax
import numpy as np
import pytest
from support.doubles.faulty_memory import LateMemory

from lora_jax.kv_cache import KVShape
from lora_jax.memory.host import HostMemory
from lora_jax.memory.pool import PagePool
from lora_jax.memory.virtual import OutOfPages
from lora_jax.pooled import PooledPages, PooledRows

FLOAT, PAGE = np.dtype(np.float32), 4096
SHAPE = KVShape(num_layers=2, num_kv_heads=2, k_dim=16, v_dim=16)  # K of 4 tokens: 1 KiB


def make_pool(pages: int = 8) -> PagePool:
    return PagePool(HostMemory(), page_bytes=PAGE, budget_bytes=pages * PAGE)


def test_a_kv_page_of_all_layers_is_one_piece_and_layers_share_block_tables():
    pages = PooledPages(make_pool(), SHAPE, 8, 4, FLOAT)
    pages.map(range(4, 8))
    (tensor, _), size = pages._tensors, 2 * 4 * 2 * 16
    tensor.pool.memory.write(tensor.address + 5 * size * 4, np.arange(size, dtype=FLOAT))
    read = jax.jit(lambda k: k[5 * pages.stride])
    found = [np.asarray(read(layer.k)).ravel() for layer in pages.cache]
    np.testing.assert_array_equal(np.concatenate(found), np.arange(size))
    assert all(layer.in_place for layer in pages.cache)
    pages.check_integrity(range(4, 8))
    pages.close()


def test_a_latent_has_no_v():
    latent = KVShape(num_layers=2, num_kv_heads=1, k_dim=64, v_dim=0)
    pages = PooledPages(make_pool(), latent, 8, 4, FLOAT)
    assert {layer.v.size for layer in pages.cache} == {0}
    pages.map(range(2))
    assert pages.pool.stats().in_use == 1
    pages.close()


def test_memory_comes_and_goes_while_addresses_stay():
    pool = make_pool(pages=4)
    pages = PooledPages(pool, SHAPE, 16, 4, FLOAT)
    before = [layer.k.unsafe_buffer_pointer() for layer in pages.cache]
    pages.map(range(0, 8))
    with pytest.raises(OutOfPages):
        pages.map(range(8, 16))
    pages.check_integrity(range(0, 8))
    pages.unmap(range(0, 8))
    pages.map(range(8, 16))
    assert [layer.k.unsafe_buffer_pointer() for layer in pages.cache] == before
    pages.close()
    assert pool.stats().in_use == 0


def test_rows_of_one_width_follow_each_other_on_shared_pages():
    pool = make_pool(pages=3)
    rows = PooledRows(pool, {64: 100, 32: 100}, FLOAT)
    first, second = ((64, 0, 10), (64, 10, 5)), ((64, 15, 1), (32, 0, 3))
    assert rows.num_missing(first) == 1
    rows.map(first)
    assert rows.num_missing(second) == 1, "the rows of width 64 have a page already"
    assert rows.most_pages({64: 17, 32: 1}) == 5
    rows.map(second)
    values = np.random.default_rng(0).normal(size=(5, 64)).astype(FLOAT)
    rows.begin_write(64, 10, values)
    rows.finish_writes()
    np.testing.assert_array_equal(np.asarray(rows.arrays["64"][10:15]), values)
    rows.unmap(first)
    rows.check_integrity(second)
    assert pool.stats().in_use == 2
    with pytest.raises(OutOfPages):
        rows.map(((64, 32, 40),))
    rows.check_integrity(second)
    rows.close()


def test_rows_lose_their_memory_when_what_was_begun_has_been_written():
    memory = LateMemory(HostMemory())
    pool = PagePool(memory, page_bytes=PAGE, budget_bytes=2 * PAGE)
    rows = PooledRows(pool, {64: 10}, FLOAT)
    rows.map(((64, 0, 2),))
    memory.fail("write", 1)  # the other one is written
    for start in (0, 1):
        rows.begin_write(64, start, np.ones((1, 64), FLOAT))
    rows.close()  # the error has no reader any more
    assert not memory.heal()
    assert not memory.begun
