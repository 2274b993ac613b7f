"""The cache holds the bytes that its shape says."""

import jax.numpy as jnp

from lora_jax.kv_cache import KVShape, init_cache, pages_sharding
from lora_jax.ops.kv_rows import CODED
from lora_jax.sharding import Split, make_mesh


def test_latent_cache_has_no_v_and_bytes_per_token_counts_it_so():
    shape = KVShape(num_layers=3, num_kv_heads=1, k_dim=20, v_dim=0)
    cache = init_cache(shape, num_pages=2, page_size=4, dtype=jnp.dtype("bfloat16"))
    assert [layer.v.size for layer in cache] == [0, 0, 0]
    held = sum(layer.k.nbytes + layer.v.nbytes for layer in cache)
    assert held == 2 * 4 * shape.bytes_per_token(jnp.dtype("bfloat16"))


def test_pages_in_8_bits_have_a_scale_for_each_row():
    shape = KVShape(num_layers=2, num_kv_heads=2, k_dim=128, v_dim=128)
    held = sum(layer.k.nbytes + layer.v.nbytes for layer in init_cache(shape, 3, 4, CODED))
    assert held == 3 * 4 * shape.bytes_per_token(CODED) == 3 * 4 * 2 * 2 * 2 * (128 + 16)
    assert shape.bytes_per_token(CODED) < 0.57 * shape.bytes_per_token(jnp.dtype("bfloat16"))
    latent = KVShape(num_layers=1, num_kv_heads=1, k_dim=20, v_dim=0)
    assert latent.bytes_per_token(CODED) == 36


def test_devices_share_the_heads_and_have_a_latent_whole():
    split = Split(make_mesh(2))
    heads = KVShape(num_layers=1, num_kv_heads=2, k_dim=4, v_dim=4)
    assert pages_sharding(heads, split) == split.heads
    assert pages_sharding(KVShape(1, 1, 20, 0), split) == split.whole
    assert pages_sharding(heads, None) is None
