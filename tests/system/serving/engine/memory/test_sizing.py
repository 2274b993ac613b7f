"""KV pages from bytes, and the errors that say what does not fit."""

import pytest

from serving.api.config import EngineConfig
from serving.engine.memory.sizing import (
    DEFAULT_KV_BYTES,
    DEFAULT_LORA_BYTES,
    LORA_SHARE,
    CacheSize,
    adapter_bytes,
    cache_size,
    free_bytes,
    host_pages,
    kv_bytes,
    lora_share,
    shortage_line,
    whole_adapters,
)


def config(**fields):
    return EngineConfig("model", **{"max_num_seqs": 4, "block_size": 16, **fields})


def test_room_for_every_sequence_at_full_length():
    assert cache_size(config(), 100, 50) == CacheSize(4 * 4, 16, 50)
    assert cache_size(config(max_model_len=33), 100, 50) == CacheSize(4 * 3, 16, 33)


def test_the_budget_caps_pages_and_the_length_nobody_asked_for():
    assert cache_size(config(kv_cache_memory_bytes=16 * 100 * 5), 100, 50).num_pages == 5
    small = cache_size(config(kv_cache_memory_bytes=16 * 100 * 2), 100, 50)
    assert small == CacheSize(2, 16, 32)
    default = cache_size(config(), 1 << 20, 1 << 17)
    assert default.num_pages * 16 << 20 == DEFAULT_KV_BYTES
    assert default.max_model_len == 256


def test_what_does_not_fit_is_refused_with_numbers():
    with pytest.raises(ValueError, match="max_model_len is 51, but the model has 50"):
        cache_size(config(max_model_len=51), 100, 50)
    small = config(max_model_len=50, kv_cache_memory_bytes=3200)
    for free in (None, 9000):
        with pytest.raises(ValueError, match=r"50 takes 5000 bytes.* budget is 3200.* or raise kv"):
            cache_size(small, 100, 50, free)
    with pytest.raises(ValueError, match=r"budget is 3200.* or give adapters less by lora_memory"):
        cache_size(config(max_model_len=50), 100, 50, 3200)
    what = (
        r"budget is 3200, beside 77 bytes for a step's own arrays\. Lower max_model_len, max_num_ba"
    )
    with pytest.raises(ValueError, match=what):
        cache_size(config(max_model_len=50), 100, 50, 3200, 77)
    with pytest.raises(ValueError, match="is 1500, beside 9 bytes for a step's own arrays"):
        cache_size(config(), 100, 50, 1500, 9)
    with pytest.raises(ValueError, match="takes 1600 bytes; the budget is 1500"):
        cache_size(config(kv_cache_memory_bytes=1500), 100, 50)


def test_adapter_slots_fit_the_largest_adapter_and_not_much_more():
    assert adapter_bytes(config(max_loras=3), 1000) == 3000
    assert adapter_bytes(config(max_loras=3), DEFAULT_LORA_BYTES // 2) == DEFAULT_LORA_BYTES
    assert adapter_bytes(config(max_loras=3), 2 * DEFAULT_LORA_BYTES) == 2 * DEFAULT_LORA_BYTES
    assert adapter_bytes(config(lora_memory_bytes=77), 1000) == 77


def test_adapter_slots_are_for_adapters_of_the_rank_that_they_have():
    free = 1 << 30
    assert adapter_bytes(config(max_loras=16), 4000, free, usual=1000) == 16_000
    assert adapter_bytes(config(max_loras=3), 4000, free, usual=1000) == 4000
    assert adapter_bytes(config(max_loras=16), 4000, 20_000, usual=1000) == 5000
    assert adapter_bytes(config(max_loras=16, lora_memory_bytes=77), 4000, usual=1000) == 77


def test_an_accelerator_gives_kv_pages_what_weights_and_adapters_leave():
    half = config(gpu_memory_utilization=0.5)
    assert free_bytes(half, 1000, 300) == 200
    assert kv_bytes(200, 50) == 150
    assert cache_size(half, 1, 1000, 150).num_pages == 150 // 16
    asked = config(kv_cache_memory_bytes=32)
    assert cache_size(asked, 1, 1000, 150).num_pages == 2
    with pytest.raises(ValueError, match=r"Weights \(500 bytes\) leave no"):
        free_bytes(half, 1000, 500)
    assert (free_bytes(half, 1000, 300, 500), free_bytes(half, 1000, 300, 600)) == (200, 100)
    with pytest.raises(ValueError, match=r"own arrays \(700 bytes\) leave .* Lower max_num"):
        free_bytes(half, 1000, 300, 700)
    with pytest.raises(ValueError, match=r"Adapter slots of 200 bytes leave no room .* 200 bytes"):
        kv_bytes(200, 200)


def test_on_an_accelerator_adapters_get_a_share_of_what_weights_leave():
    assert adapter_bytes(config(max_loras=3), 1000, 1 << 20) == 3000
    assert adapter_bytes(config(max_loras=16), 1000, 20_000) == 20_000 * LORA_SHARE
    asked = lora_share(config(), 1)
    assert adapter_bytes(config(max_loras=16), 1000, 20_000, asked) == 10_000
    assert adapter_bytes(config(max_loras=16), 1000, 2000) == 1000
    assert adapter_bytes(config(lora_memory_bytes=77), 1000, 2000) == 77


def test_adapters_that_are_given_or_may_come_from_a_folder_get_up_to_half():
    assert lora_share(config(), 0) == LORA_SHARE
    assert lora_share(config(), 3) == lora_share(config(lora_dir="adapters"), 0) == 0.5


def test_host_memory_holds_whole_pages_and_no_more_than_there_is():
    small = config(kv_offloading_size=0.001)
    assert host_pages(small, 1000, 1 << 30) == 1073
    assert host_pages(config(), 1000, 1 << 30) == 0
    with pytest.raises(ValueError, match="one KV page of 16 tokens takes 2000000"):
        host_pages(small, 2_000_000, 1 << 30)
    with pytest.raises(ValueError, match=r"2048 GiB; the host has 1\.0 GiB"):
        host_pages(config(kv_offloading_size=2048), 1000, 1 << 30)
    with pytest.raises(ValueError, match="kv_offloading_size must be 0 to"):
        config(kv_offloading_size=-1.0)
    with pytest.raises(ValueError, match="enable_prefix_caching on"):
        config(kv_offloading_size=1.0, enable_prefix_caching=False)


def test_whole_adapters_are_bounded_by_the_scarcest_rows():
    assert whole_adapters({8: 4, 16: 2}, {8: 100, 16: 5}) == 2
    assert whole_adapters({8: 4, 16: 0}, {8: 11}) == 2
    assert whole_adapters({8: 4}, {16: 5}) == 0


def test_a_shortage_names_both_numbers_and_the_flag():
    asked = config(max_loras=16, max_lora_rank=64)
    line = shortage_line(asked, 5, 100_000_000, "--lora-memory-bytes", 536_870_912, 1_600_000_000)
    assert line == (
        "LoRA memory of 536.9 MB holds 5 adapters of rank 64 on every module (100.0 MB each), "
        "--max-loras is 16: requests for more than 5 at a time wait for exchanges. "
        "--lora-memory-bytes 1600000000 has room for all 16."
    )
    line = shortage_line(asked, 5, 1, "", 1, 1, rank=8)
    assert line is not None
    assert "5 adapters of rank 8 on" in line
    assert shortage_line(asked, 16, 1, "", 16, 16) is None
