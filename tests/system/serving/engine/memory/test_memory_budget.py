"""Memory that the device reports becomes KV pages; one that reports none gets the default."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from support.cases import tiny_checkpoint

from lora_jax.adapters.slots import rows_per_adapter
from lora_jax.models import load
from lora_jax.rank_rows import rows_nbytes
from serving.api.config import EngineConfig
from serving.engine.memory import memory_budget, step_arrays
from serving.engine.memory.sizing import DEFAULT_KV_BYTES

SHAPE = tiny_checkpoint.TinyShape(hidden=16, width=24, layers=1, max_positions=1 << 20)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint.write_model(folder, SHAPE)
    return load(folder)


class Device:
    """As much of a device as is asked for."""

    def __init__(self, stats):
        self.memory_stats = lambda: stats


@pytest.mark.parametrize("limit", [None, 1 << 21, 1 << 22])
def test_pages_follow_what_the_device_has_left(loaded, monkeypatch, limit):
    stats = None if limit is None else {"bytes_limit": limit, "bytes_in_use": 1000}
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(stats)])
    model, config = loaded
    engine = EngineConfig("m", gpu_memory_utilization=0.5, lora_memory_bytes=24)
    wide, here = jnp.dtype(jnp.float32), model.catalogue(config)
    size = memory_budget.size_kv_cache(engine, model, config, here, wide)
    per_page = model.kv_shape(config).bytes_per_token(jnp.dtype(jnp.float32)) * size.page_size
    want = DEFAULT_KV_BYTES if limit is None else limit // 2 - 1024
    assert size.num_pages == want // per_page


def test_pages_and_slots_leave_what_a_step_takes_for_itself(loaded, monkeypatch):
    device = Device({"bytes_limit": 1 << 20, "bytes_in_use": 1000})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    model, config = loaded
    engine, wide = EngineConfig("m", max_loras=1, max_lora_rank=1), jnp.dtype(jnp.float32)
    here, shape = model.catalogue(config), model.kv_shape(config)
    size = memory_budget.size_kv_cache(engine, model, config, here, wide)
    longest = size.max_model_len
    needed = step_arrays.step_bytes(engine, config, shape, wide, longest)
    assert (1 << 20) // 10 < needed <= size.step_bytes
    _, spec = memory_budget.make_allocator(engine, here, here, wide, step=size.step_bytes)
    held = size.num_pages * size.page_size * shape.bytes_per_token(wide) + rows_nbytes(spec.rows, 4)
    assert needed <= (1 << 20) - 1000 - held <= size.step_bytes + size.page_size * 64
    asked = dataclasses.replace(engine, kv_cache_memory_bytes=1 << 19)
    assert memory_budget.size_kv_cache(asked, model, config, here, wide).step_bytes == 0


def test_an_allocator_without_a_limit_has_what_the_driver_has_left(monkeypatch):
    stats = {"bytes_limit": 0, "bytes_in_use": 1000}  # XLA's "cuda_async"
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(stats)])
    memory = SimpleNamespace(usage=lambda: SimpleNamespace(device_free=1 << 20))
    monkeypatch.setattr(memory_budget, "for_platform", lambda name: memory)
    engine = EngineConfig("m", gpu_memory_utilization=0.5)
    assert memory_budget.free_device_bytes(engine) == 1 << 19


def test_adapter_slots_get_their_budget(loaded):
    model, config = loaded
    catalogue, wide = model.catalogue(config), jnp.dtype(jnp.float32)
    engine = EngineConfig("m", max_loras=3, max_lora_rank=4)
    allocator, spec = memory_budget.make_allocator(engine, catalogue, catalogue, wide)
    assert (allocator.num_slots, spec.num_slots) == (3, 3)
    assert spec.rows == {w: 3 * n for w, n in memory_budget.rows_per_adapter(catalogue, 4).items()}


def test_a_device_has_slots_for_adapters_of_the_rank_that_they_have(loaded, monkeypatch, caplog):
    """Pages get the rest, by the same sum; one adapter of max_lora_rank still fits."""
    device = Device({"bytes_limit": 1 << 24, "bytes_in_use": 0})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    model, config = loaded
    here, wide = model.catalogue(config), jnp.dtype(jnp.float32)
    engine = EngineConfig("m", max_loras=3, max_lora_rank=32)
    pages, rows = {}, {}
    caplog.set_level("INFO")
    for rank in (None, 16, 4):
        sized = memory_budget.size_kv_cache(engine, model, config, here, wide, rank=rank)
        _, spec = memory_budget.make_allocator(engine, here, here, wide, rank=rank)
        pages[rank], rows[rank] = sized.num_pages, spec.rows
    per_page = model.kv_shape(config).bytes_per_token(wide) * sized.page_size
    gained = rows_nbytes(rows[None], 4) - rows_nbytes(rows[16], 4)
    told = [r.getMessage() for r in caplog.records if "largest that was given" in r.getMessage()]
    assert ["rank 16" in line for line in told] == [True, False]
    all_of_them = rows_nbytes(rows[None], 4)
    assert f"--lora-memory-bytes {all_of_them} has room for 3 of --max-lora-rank 32." in told[0]
    assert rows[None] == {w: 3 * n for w, n in rows_per_adapter(here, 32).items()}
    assert rows[16] == {w: 3 * n for w, n in rows_per_adapter(here, 16).items()}
    assert rows[4] == rows_per_adapter(here, 32)
    assert abs(pages[16] - pages[None] - gained / per_page) <= 1
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(None)])  # KV pages have a size here
    _, spec = memory_budget.make_allocator(engine, here, here, wide, rank=4)
    assert spec.rows == rows[None]


def test_an_instance_leaves_no_room_for_what_a_lora_server_holds(loaded, monkeypatch):
    monkeypatch.setattr(
        jax, "local_devices", lambda: [Device({"bytes_limit": 1 << 24, "bytes_in_use": 0})]
    )
    model, config = loaded
    whole, wide = model.catalogue(config), jnp.dtype(jnp.float32)
    attention = {n: m for n, m in whole.modules.items() if n in ("q_proj", "v_proj")}
    some = dataclasses.replace(whole, modules=attention)
    engine = EngineConfig("m", max_loras=2, max_lora_rank=8)
    pages = [
        memory_budget.size_kv_cache(engine, model, config, here, wide, count).num_pages
        for here, count in ((whole, 0), (some, 0), (some, 3))
    ]
    assert pages[1] > pages[0] > pages[2]


def test_slots_for_whole_adapters_come_on_top_of_those_of_some_modules(loaded):
    model, config = loaded
    catalogue, wide = model.catalogue(config), jnp.dtype(jnp.float32)
    engine = EngineConfig("m", max_loras=3, max_lora_rank=4)
    plain, few = memory_budget.make_allocator(engine, catalogue, catalogue, wide)
    more, spec = memory_budget.make_allocator(engine, catalogue, catalogue, wide, 2)
    assert (plain.num_slots, more.num_slots) == (3, 5)
    one = rows_per_adapter(catalogue, 4)
    assert spec.rows == {width: few.rows[width] + 2 * count for width, count in one.items()}


def test_an_engine_whose_modules_are_all_elsewhere_lacks_no_memory(loaded, caplog):
    model, config = loaded
    catalogue, wide = model.catalogue(config), jnp.dtype(jnp.float32)
    nothing = dataclasses.replace(catalogue, modules={})
    with caplog.at_level("WARNING"):
        memory_budget.make_allocator(EngineConfig("m", max_loras=3), catalogue, nothing, wide)
    assert not caplog.records


@pytest.mark.parametrize("held", [3, 2])
def test_memory_for_fewer_adapters_than_slots_is_logged_once(loaded, caplog, held):
    model, config = loaded
    catalogue, wide = model.catalogue(config), jnp.dtype(jnp.float32)
    one = rows_nbytes(rows_per_adapter(catalogue, 4), wide.itemsize)
    engine = EngineConfig("m", max_loras=3, max_lora_rank=4, lora_memory_bytes=held * one)
    with caplog.at_level("WARNING"):
        memory_budget.make_allocator(engine, catalogue, catalogue, wide)
    lines = [record.getMessage() for record in caplog.records]
    if held == 3:
        assert not lines
        return
    (line,) = lines
    assert "holds 2 adapters of rank 4 on every module" in line
    assert "--max-loras is 3" in line
    assert f"--lora-memory-bytes {3 * one} has room for all 3." in line
