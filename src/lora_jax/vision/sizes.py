"""Sizes that images are brought to, as transformers' processors choose them. No jax."""

import math

MAX_RATIO = 200  # of an image's sides


def check_ratio(height: int, width: int) -> None:
    """Raise ValueError for an image whose sides differ by more than MAX_RATIO."""
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(
            f"An image of {width} x {height} pixels is too narrow: its sides may differ by a "
            f"factor of {MAX_RATIO} at most."
        )


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return height and width: multiples of `factor`, the area within bounds where they allow it.

    Qwen's rule; halves round to even.
    """
    high, wide = (round(side / factor) * factor for side in (height, width))
    if high * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        sides = (math.floor(side / shrink / factor) * factor for side in (height, width))
        high, wide = (max(factor, side) for side in sides)
    elif high * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        high, wide = (math.ceil(side * grow / factor) * factor for side in (height, width))
    return high, wide


def most_cells(factor: int, min_pixels: int, max_pixels: int) -> int:
    """Return a number of factor x factor squares that no image is brought to more of.

    It is above max_pixels / factor^2 where bounds are tight: a narrow image keeps one row of
    squares, and an image that is enlarged has both sides rounded up.
    """
    shrunk = max(max_pixels // factor**2, math.floor(math.sqrt(MAX_RATIO * max_pixels) / factor))
    area = min_pixels / factor**2
    narrowest = math.sqrt(area / MAX_RATIO)  # the shorter side, in squares
    shorter = range(math.ceil(narrowest), math.ceil(math.sqrt(area)) + 1)
    grown = (short * math.ceil(area / max(short - 1, narrowest)) for short in shorter)
    return max(1, shrunk, *grown)


def shortest_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """Return height and width with the shorter side `edge` pixels long: CLIP's rule."""
    if width <= height:
        return int(edge * height / width), edge
    return edge, int(edge * width / height)
