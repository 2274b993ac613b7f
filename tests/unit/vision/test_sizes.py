"""Sizes of images, with transformers' rule as the oracle and its odd cases by hand."""

import numpy as np
import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as oracle

from lora_jax.vision.sizes import check_ratio, most_cells, shortest_edge, smart_resize


def test_a_thousand_sizes_are_those_of_transformers():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        height, width = (int(x) for x in rng.integers(1, 3000, 2))
        if max(height, width) > 200 * min(height, width):
            continue
        factor = int(rng.choice([28, 32]))
        low, high = (3136, 1 << 20) if factor == 28 else (65536, 16777216)
        want = oracle(height, width, factor, low, high)
        assert smart_resize(height, width, factor, low, high) == want


def test_halves_round_to_even():
    assert smart_resize(336, 336, 32, 1024, 1 << 24) == (320, 320)


@pytest.mark.parametrize(
    ("low", "high"),
    [(4096, 4096), (16, 4096), (4000, 4096), (65536, 65536), (1, 1), (256, 9000), (3000, 1 << 20)],
)
def test_no_image_is_brought_to_more_squares_than_the_most(low: int, high: int):
    factor, seen = 16, []
    for short in [*range(1, 40), 64, 100, 333]:
        for ratio in [1, 1.01, 1.2, 1.5, 2, 2.1, 3, 5, 8, 13, 21, 50, 99, 150, 199, 200]:
            sides = short, int(short * ratio)
            for height, width in (sides, sides[::-1]):
                size = smart_resize(height, width, factor, low, high)
                seen.append(size[0] * size[1] // factor**2)
    most = most_cells(factor, low, high)
    assert max(seen) <= most
    assert max(seen) >= 0.75 * min(most, 333 * 333 * 200 // factor**2)  # the bound is not loose


def test_the_shorter_side_gets_the_length():
    assert shortest_edge(480, 640, 336) == (336, 448)
    assert shortest_edge(640, 480, 336) == (448, 336)
    assert shortest_edge(500, 333, 336) == (int(336 * 500 / 333), 336)


def test_a_narrow_image_is_refused_with_its_size():
    check_ratio(1, 200)
    with pytest.raises(ValueError, match="201 x 1 pixels"):
        check_ratio(1, 201)
