"""Row items: every row of a segment is in exactly one item, which stays within one tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.ops.row_items import places, row_items

jitted = jax.jit(row_items, static_argnums=2)


@pytest.mark.parametrize("tile", [1, 4, 16, 64])
@pytest.mark.parametrize("num_rows", [0, 1, 16, 37, 40])
def test_items_cover_the_rows_once_within_tiles_and_segments(num_rows, tile):
    begins = np.random.default_rng(tile + num_rows).random(40) < 0.3
    items = jitted(jnp.asarray(begins), jnp.int32(num_rows), tile)
    segment_of_row = np.cumsum(begins | (np.arange(40) == 0)) - 1
    covered = []
    for i in range(int(items.num_items)):
        rows = np.arange(int(items.start[i]), int(items.end[i]))
        assert len(set(rows // tile)) == 1
        assert set(segment_of_row[rows]) == {int(items.segment[i])}
        covered += list(rows)
    assert covered == list(range(num_rows))
    assert int(items.segment.min()) >= 0
    segments = sorted(set(segment_of_row[:num_rows]))
    assert int(items.num_segments) == len(segments)
    for segment in segments:
        assert int(items.segment_start[segment]) == int(np.argmax(segment_of_row == segment))


def test_an_item_per_segment_and_tile_is_all():
    """Segments of 3, 7 and 6 rows in tiles of 8."""
    begins = jnp.zeros(16, bool).at[jnp.array([0, 3, 10])].set(True)
    items = jitted(begins, jnp.int32(16), 8)
    assert int(items.num_items) == 4
    assert list(items.start[:4]) == [0, 3, 8, 10]
    assert list(items.end[:4]) == [3, 8, 10, 16]
    assert list(items.segment[:4]) == [0, 1, 1, 2]


def test_places_of_nothing_and_of_everything():
    assert list(places(jnp.zeros(3, bool), 7)) == [7, 7, 7]
    assert list(places(jnp.ones(3, bool), 7)) == [0, 1, 2]
    assert list(places(jnp.array([False, True, True]), 7)) == [1, 2, 7]
