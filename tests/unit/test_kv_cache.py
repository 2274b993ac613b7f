"""The cache holds the bytes that its shape says."""

import jax.numpy as jnp

from lora_jax.kv_cache import KVShape, init_cache


def test_latent_cache_has_no_v_and_bytes_per_token_counts_it_so():
    shape = KVShape(num_layers=3, num_kv_heads=1, k_dim=20, v_dim=0)
    cache = init_cache(shape, num_pages=2, page_size=4, dtype=jnp.dtype("bfloat16"))
    assert [layer.v.size for layer in cache] == [0, 0, 0]
    held = sum(layer.k.nbytes + layer.v.nbytes for layer in cache)
    assert held == 2 * 4 * shape.bytes_per_token(jnp.dtype("bfloat16"))
