"""ESFT experts take pages of the exchange's pool, and give them up for their worth."""

import pytest
from support.cases import tiny_esft

from lora_jax.adapters.formats import esft_format
from lora_jax.models import load
from serving.api.config import EngineConfig
from serving.loading.esft_parts import make_esft
from serving.loading.pooled_experts import PooledExpertAllocator
from serving.scheduling.pages.exchange import PageExchange

CHOSEN = {0: (1, 4), 2: (0, 3, 5)}


def test_adapters_come_and_go_over_one_pool(tmp_path):
    base = tiny_esft.write_moe(tmp_path / "base", "qwen3_moe")
    model, model_config = load(base)
    weights = []
    for seed in range(2):
        tiny_esft.write_esft_adapter(tmp_path / f"a{seed}", base, CHOSEN, seed)
        weights.append(esft_format.read(tmp_path / f"a{seed}", model.catalogue(model_config)))
    one, two = weights
    config = EngineConfig(str(base), page_pool_bytes=110 << 10, max_esft_adapters=3)
    esft = make_esft(config, model, model_config)
    assert esft is not None
    room, pool = esft.room, esft.room.tensors.pool
    allocator = room.allocator
    assert isinstance(allocator, PooledExpertAllocator)
    exchange = PageExchange(pool, kept=room.tensors.base_pages)
    allocator.join(exchange, most_pages=exchange.available)
    total = exchange.shares(0).total_bytes
    assert 100 << 10 <= total <= 110 << 10
    allocator.check_fits(one)

    assert allocator.make_room(one)
    placement = allocator.place(one)
    assert 0 < exchange.available < pool.num_available, "pages that it has yet to take"
    assert exchange._coming == {one.digest}
    allocator.spent(0.5)
    job = room.job(placement, esft.tables)
    while job.remaining > 1:  # all but the tables
        job.advance(esft.tables, 1)
    allocator.finish_loading(one.digest)
    assert not exchange._coming
    assert exchange.load_s(1) > 1e-9, "it took half a second"
    used = exchange.shares(0).adapter_bytes
    assert used > 3 * room.tensors.expert_bytes  # some lie on pages of the base
    assert exchange.available == pool.num_available

    allocator.acquire(one.digest)
    assert allocator.offer() is None
    allocator.release(one.digest)
    offer = allocator.offer()
    assert offer is not None
    allocator.is_needed = lambda digest: digest == one.digest
    needed = allocator.offer()
    assert needed is not None
    assert needed.value > offer.value, "a request that waits is a use to come"
    taken = pool.acquire([1] * pool.num_available)  # by somebody else
    exchange.start_step()
    assert not allocator.make_room(two), "there is no page, so the idle one leaves"
    assert allocator.pages_leaving
    while room.is_busy:
        room.collect(dispatched=1, read=1)
    for block in taken:
        pool.release(block)
    exchange.start_step()
    assert allocator.make_room(two)
    allocator.check_integrity()
    room.tensors.check_integrity()

    allocator.join(exchange, most_pages=2)
    with pytest.raises(ValueError, match="pages of the pool; 2 may be adapters'"):
        allocator.check_fits(two)
    room.close()
