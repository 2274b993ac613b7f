"""KV and adapters over one budget of pages: its sizes, what it refuses, an engine that shifts."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from support.cases import adapter_cases, engine_cases
from support.cases.engine_cases import GREEDY, SHAPES, answer, prompts_of, settle

from lora_jax.adapters.slots import rows_per_adapter, saved_rows
from lora_jax.adapters.vocabulary import with_vocabulary
from lora_jax.memory.virtual import Usage
from serving import Engine
from serving.api.config import EngineConfig
from serving.engine.memory import page_pool
from serving.engine.memory.page_pool import (
    check_free,
    check_kernels,
    check_platform,
    largest_adapter,
    pool_sizes,
)

KIB = 1 << 10


def config(**fields) -> EngineConfig:
    return EngineConfig("m", **{"page_pool_bytes": 512 * KIB, "block_size": 4, **fields})


def sizes(**fields):
    """A KV page has K and V of 2 KiB, an adapter rows of two widths."""
    return pool_sizes(config(**fields), (2 * KIB, 2 * KIB), (9 * KIB, 3 * KIB), 100, 4 * KIB)


def test_a_pool_has_room_for_the_longest_sequence_and_one_adapter():
    found = sizes(max_model_len=64, max_num_seqs=8)
    assert (found.page_bytes, found.pages) == (4 * KIB, 128)
    assert (found.extent, found.extent_pages) == (2, 2)
    assert found.least_kv == 16  # pages of 4 tokens
    # An adapter may lie across borders: 9 KiB on 4 pages, 3 on 2; the rest may be KV's.
    assert found.kv_pages == 122
    assert sizes(max_model_len=64, max_num_seqs=2).kv_pages == 32  # more, nobody could fill


def test_a_length_that_was_not_asked_for_is_at_most_half_of_the_pool():
    assert sizes().max_model_len == 100
    assert sizes(page_pool_bytes=128 * KIB).max_model_len == 52


def test_an_adapter_is_counted_once_and_whole_embeddings_beside_it():
    catalogue = adapter_cases.llama(hidden=64, inner=48, layers=2)
    assert largest_adapter(catalogue, 8) == rows_per_adapter(catalogue, 8)
    brings = with_vocabulary(catalogue, tied=False, most_tokens=0, most_saved=3)
    (width,) = saved_rows(brings)
    assert largest_adapter(brings, 8) == rows_per_adapter(catalogue, 8) | {width: 3}


def test_a_pool_too_small_is_refused_with_what_it_needs():
    with pytest.raises(ValueError, match="A sequence of 100 tokens and an adapter of rank 64 take"):
        sizes(page_pool_bytes=100 * KIB, max_model_len=100)
    with pytest.raises(ValueError, match="max_model_len is 101, but the model has 100 positions"):
        sizes(max_model_len=101)


def test_what_no_gpu_kernel_serves_is_refused_by_name(monkeypatch):
    catalogue = adapter_cases.llama(hidden=64, inner=48, layers=2)
    plain = SimpleNamespace(head_dim=128, mla=None)
    check_kernels(config(), plain, catalogue, jnp.dtype(jnp.bfloat16))
    refused = {
        "dtype float32, but bfloat16": (config(), plain, jnp.float32),
        "kv_cache_dtype fp8": (config(kv_cache_dtype="fp8"), plain, jnp.bfloat16),
        "latent attention": (config(), SimpleNamespace(head_dim=128, mla=1), jnp.bfloat16),
        "heads of 80": (config(), SimpleNamespace(head_dim=80, mla=None), jnp.bfloat16),
    }
    for words, (asked, model, dtype) in refused.items():
        with pytest.raises(ValueError, match=f"on a GPU does not go with {words}"):
            check_kernels(asked, model, catalogue, jnp.dtype(dtype))
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(ValueError, match="CPUs and NVIDIA GPUs; on tpu"):
        check_platform(config())


def test_a_pool_beyond_the_devices_memory_is_refused_before_any_is_taken():
    memory = SimpleNamespace(usage=lambda: Usage(0, 0, 90, 10))
    check_free(memory, 10)
    with pytest.raises(ValueError, match=r"takes 11 bytes .* the device has 10 left"):
        check_free(memory, 11)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Two engines of the same bytes: in one pool, and today's."""
    folder = tmp_path_factory.mktemp("pool")
    static = engine_cases.make_engine(folder, SHAPES["llama"])
    adapters = {f"a{n}": str(folder / f"a{n}") for n in range(8)}
    pool = Engine(
        str(folder / "model"),
        adapters=adapters,
        dtype="float32",
        max_model_len=96,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=4,
        page_pool_bytes=160 * KIB,
        max_loras=16,
        max_lora_rank=8,
        structured_outputs=False,
    )
    with static, pool:
        yield static, pool


def test_memory_moves_both_ways_and_no_answer_changes(engines):
    static, pool = engines
    most = {"adapters": 0, "kv": 0}
    for seed, phase in enumerate(("adapters", "kv", "adapters", "both")):
        high, names = (12, range(8)) if phase == "adapters" else (80, range(3))
        prompts = prompts_of(24, seed=seed, low=3, high=high)
        users = [None if n % 5 == 4 else f"a{names[n % len(names)]}" for n in range(24)]
        wanted = [answer(o) for o in static.generate(prompts, users, [GREEDY] * 24)]
        found = [answer(o) for o in pool.generate(prompts, users, [GREEDY] * 24)]
        assert found == wanted
        shares = pool.stats().pool
        most["adapters"] = max(most["adapters"], shares.adapter_bytes)
        most["kv"] = max(most["kv"], shares.kv_bytes)
    settle(pool)
    shares = pool.stats().pool
    assert shares.given > 8
    assert most["kv"] > 24 * KIB, "KV never had more than the longest sequence's pages"
    assert most["adapters"] > shares.total_bytes // 2
    assert pool.stats().compilations_after_warmup == 0


def test_without_kernels_that_write_in_place_a_cpu_has_no_pool(monkeypatch):
    monkeypatch.setattr(page_pool.build, "available", lambda: False)
    with pytest.raises(ValueError, match=r"needs the C\+\+ kernels, .* install g\+\+"):
        check_platform(config())


def test_pages_grow_with_the_granularity_and_stay_many():
    small = dataclasses.replace(config(), page_pool_bytes=1 << 20)
    assert page_pool.page_size(small, 4096) == 4096
    medium = dataclasses.replace(config(), page_pool_bytes=16 << 20)
    assert page_pool.page_size(medium, 4096) == 16 << 10  # 1024 pages
    large = dataclasses.replace(config(), page_pool_bytes=1 << 40)
    assert page_pool.page_size(large, 4096) == page_pool.LARGEST_PAGE
    assert page_pool.page_size(small, 1 << 21) == 1 << 21  # never below the memory's own
