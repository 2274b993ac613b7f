"""Pages that went to the host and came back are the bytes that they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.kv_cache import KVShape, LayerCache
from lora_jax.ops.kv_rows import CODED
from serving.api.request import PageMove
from serving.steps.page_copies import PageCopies
from serving.steps.step import StepSizes

PAGES, SLOTS = 40, 30
SIZES = StepSizes(4, 64, 4, PAGES, 8, 4, num_host_pages=SLOTS)
SHAPES = {
    "heads": (KVShape(3, 2, 8, 8), jnp.dtype("bfloat16")),
    "latents": (KVShape(2, 1, 20, 0), jnp.dtype("float32")),
    "8 bits": (KVShape(2, 2, 8, 8), CODED),
}


def make_cache(shape: KVShape, dtype: jnp.dtype, seed: int = 0):
    rng, lead = np.random.default_rng(seed), (PAGES, SIZES.page_size, shape.num_kv_heads)

    def pages(dim):
        extra = 16 if dim and dtype == CODED else 0
        return jnp.asarray(rng.integers(0, 100, (*lead, dim + extra)), dtype)

    return tuple(
        LayerCache(pages(shape.k_dim), pages(shape.v_dim)) for _ in range(shape.num_layers)
    )


def on_host(cache):
    return [np.array(part) for layer in cache for part in (layer.k, layer.v)]


@pytest.mark.parametrize("name", SHAPES)
def test_pages_come_back_to_other_places_bit_for_bit(name):
    shape, dtype = SHAPES[name]
    cache, sharding = make_cache(shape, dtype), jax.devices()[0]
    copies = PageCopies(shape, SIZES, dtype, jax.sharding.SingleDeviceSharding(sharding))
    before = on_host(cache)
    cache = copies.warm_up(cache)
    for old, new in zip(before, on_host(cache), strict=True):
        np.testing.assert_array_equal(old, new)
    out = [PageMove(page, 29 - page, out=True) for page in range(20)]  # more than one program
    cache = copies.run(cache, out)
    back = [PageMove(39 - i, 29 - i, out=False) for i in range(19)]
    cache = copies.run(cache, [*back, PageMove(39, 0, out=True), PageMove(0, 0, out=False)])
    for old, new in zip(before, on_host(cache), strict=True):
        np.testing.assert_array_equal(new[39:20:-1], old[:19])
        np.testing.assert_array_equal(new[0], old[0])  # by way of 39
        np.testing.assert_array_equal(new[1:21], old[1:21])


def test_a_slot_that_is_written_again_has_the_last_page():
    shape, dtype = SHAPES["heads"]
    cache = make_cache(shape, dtype)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    copies = PageCopies(shape, SIZES, dtype, sharding)
    before = on_host(cache)
    for page in range(10):
        cache = copies.run(cache, [PageMove(page, 3, out=True)])
    cache = copies.run(cache, [PageMove(20, 3, out=False)])
    for old, new in zip(before, on_host(cache), strict=True):
        np.testing.assert_array_equal(new[20], old[9])
