"""The shadow has the same bits whether programs return its maps or a kernel writes over them."""

import ctypes
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.ops.merge import merge_apart
from serving.steps import shadow as module
from serving.steps.shadow import Shadow

WIDE, NARROW, HIGH = (16, 8), (8, 8), (8, 16)  # d_out, d_in
SHAPES = (NARROW, WIDE, HIGH, WIDE, NARROW)
SITES = ((0, 0), (1, 0), (2, 0), (1, 1), (0, 1))
RANK, SLOTS = 3, 2


def case() -> tuple[tuple[jax.Array, ...], AdapterSlots]:
    """Return maps, and slots with an adapter of ranks 3, 2, 1, ... each."""
    rng = np.random.default_rng(0)
    maps = tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in SHAPES)
    entries, used = np.zeros((3, 2, SLOTS, 5), np.int32), {8: 0, 16: 0}
    for n, ((module_, layer), (d_out, d_in)) in enumerate(zip(SITES, SHAPES, strict=True)):
        for slot in range(SLOTS):
            rank = (n + slot) % (RANK + 1)
            entries[module_, layer, slot, :3] = used[d_in], used[d_out] + RANK, rank
            used[d_in], used[d_out] = used[d_in] + RANK, used[d_out] + 2 * RANK
    pools = {
        str(size): jnp.asarray(rng.standard_normal((rows + 2 * RANK, size)), jnp.float32)
        for size, rows in used.items()
    }
    scaling = jnp.asarray(rng.standard_normal(entries.shape[:3]), jnp.float32)
    return maps, AdapterSlots(pools, jnp.asarray(entries), scaling)


def fake_writer(maps, results, *, max_rank):
    """Return a writer that does on a CPU, from a callback, what the CUDA kernel does."""
    shapes = [w.shape for w in maps]

    def over(pools, sites, scaling, token):
        at = 0
        for shape, pair in zip(dict.fromkeys(shapes), pools, strict=True):
            part = slice(at, at + shapes.count(shape))
            at = part.stop
            given = (*pair, sites[part], scaling[part])
            made = merge_apart(maps[part], *map(jnp.asarray, given), max_rank=max_rank)
            for result, w in zip(results[part], made, strict=True):
                ctypes.memmove(result.unsafe_buffer_pointer(), np.asarray(w).ctypes.data, w.nbytes)
        return token

    shape = jax.ShapeDtypeStruct((), jnp.int32)
    return functools.partial(jax.pure_callback, over, shape)


def test_what_is_written_over_has_the_bits_of_what_is_returned():
    maps, slots = case()
    returned = Shadow(maps, SITES, RANK)
    with mock.patch.object(module, "merge_writer", fake_writer):
        written = Shadow(maps, SITES, RANK)
    before = written.maps
    for number in range(SLOTS):
        tokens = [each.merge(slots, jnp.int32(number)) for each in (returned, written)]
        assert [int(token) for token in tokens] == [number] * 2
    assert written.maps is before
    for got, want, plain in zip(written.maps, returned.maps, maps, strict=True):
        np.testing.assert_array_equal(np.array(got), np.array(want))
        assert got.shape == plain.shape


def test_maps_of_one_shape_follow_each_other_and_the_smallest_are_last():
    maps, _ = case()
    with mock.patch.object(module, "merge_writer") as writer:
        Shadow(maps, SITES, RANK)
    (plain, shadow), given = writer.call_args
    assert (
        [w.shape for w in plain] == [w.shape for w in shadow] == [HIGH, WIDE, WIDE, NARROW, NARROW]
    )
    assert given == {"max_rank": RANK}
