"""Orders, positions and padding of patches against transformers' functions."""

import dataclasses

import numpy as np
import pytest
import torch
from support.cases.vision_configs import TOWER
from transformers import vision_utils

from lora_jax.vision import layout
from lora_jax.vision.processor import Patches

QWEN3 = dataclasses.replace(TOWER, patch_size=16, num_positions=48 * 48)
WINDOWS = dataclasses.replace(QWEN3, family="qwen2_5_vl", patch_size=14, window_size=112)
GRIDS = ((2, 2), (6, 10), (16, 8), (34, 60), (4, 50))


def image(grid: tuple[int, int]) -> Patches:
    """Patches whose first pixels say which they are."""
    pixels = np.zeros((grid[0] * grid[1], 12), np.uint8)
    pixels[:, 0], pixels[:, 1] = np.divmod(np.arange(len(pixels)), 256)
    return Patches(pixels, grid)


@pytest.mark.parametrize("grid", GRIDS)
def test_positions_and_taps_are_those_of_transformers(grid):
    thw = torch.tensor([[1, *grid]])
    positions = layout.block_positions(grid, 2)
    want = vision_utils.get_vision_position_ids(thw, 2).numpy()
    np.testing.assert_array_equal(positions, want)
    rows, weights = layout.table_taps(positions, grid, 48)
    want_rows, want_weights = vision_utils.get_vision_interpolation_indices_and_weights(
        thw, 48, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    np.testing.assert_array_equal(weights, want_weights.numpy())
    used = weights > 0  # a tap of weight 0 may be anywhere
    np.testing.assert_array_equal(rows[used], want_rows.numpy()[used])


@pytest.mark.parametrize("grid", GRIDS)
def test_windows_are_those_of_transformers_filled_up(grid):
    thw = torch.tensor([[1, *grid]])
    index, _ = vision_utils.get_vision_window_index(thw, 2, 112, 14)
    count = layout.tower_patches(WINDOWS, grid)
    arrays = layout.arrange(WINDOWS, image(grid), count)
    (patches,) = arrays.patches
    numbers = patches[:, 0].astype(int) * 256 + patches[:, 1]
    cells = numbers[arrays.valid].reshape(-1, 4)[:, 0] // 4
    np.testing.assert_array_equal(cells, index.numpy())
    # The n-th row of the image is the cell that `cells` says, wherever its window stands.
    firsts = numbers.reshape(-1, 4)[:, 0] // 4
    total = grid[0] * grid[1] // 4
    np.testing.assert_array_equal(firsts[arrays.cells[:total]], np.arange(total))
    assert count % 64 == 0
    assert count <= layout.most_patches(WINDOWS, total)


def test_buckets_hold_every_image_and_padding_is_marked():
    found = layout.buckets(QWEN3, layout.most_patches(QWEN3, 300))
    assert found == (64, 256, 1024, 1280)
    assert layout.buckets(QWEN3, 64) == (64,)
    clip = dataclasses.replace(QWEN3, image_size=336, patch_size=14, merge_size=1)
    assert layout.buckets(clip, layout.most_patches(clip, 4096)) == (576,)
    arrays = layout.arrange(QWEN3, image((4, 6)), 64)
    assert arrays.valid.sum() == arrays.num_patches == 24
    assert not arrays.patches[0][24:].any()
    np.testing.assert_array_equal(arrays.cells[:6], np.arange(6))
    with pytest.raises(ValueError, match="24 patches does not fit into 16"):
        layout.arrange(QWEN3, image((4, 6)), 16)


def test_patches_of_a_large_image_come_in_pieces_and_whole_ones_are_no_copies():
    one = image((44, 52))
    arrays = layout.arrange(QWEN3, one, 4096)
    assert [piece.shape for piece in arrays.patches] == [(1024, one.pixels.shape[1])] * 4
    assert [np.shares_memory(piece, one.pixels) for piece in arrays.patches] == [1, 1, 0, 0]
    whole = np.concatenate(arrays.patches)
    np.testing.assert_array_equal(whole[:2288], one.pixels)
    assert not whole[2288:].any()


def test_pieces_of_a_bucket_that_is_no_multiple_of_their_number_hold_it_exactly():
    fixed = dataclasses.replace(QWEN3, image_size=910, patch_size=14, merge_size=1)
    (bucket,) = layout.buckets(fixed, 0)
    one = image((65, 65))
    arrays = layout.arrange(fixed, one, bucket)
    assert [len(piece) for piece in arrays.patches] == [1057, 1057, 1057, 1054]
    assert len(arrays.positions) == bucket
    np.testing.assert_array_equal(np.concatenate(arrays.patches), one.pixels)


def test_no_image_is_possible():
    """A warm-up runs on it."""
    for config in (QWEN3, WINDOWS):
        assert not layout.arrange(
            config, Patches(np.zeros((0, 12), np.uint8), (0, 0)), 64
        ).valid.any()
