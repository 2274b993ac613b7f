"""Rope positions of a prompt with images: time, row and column of every token. No jax."""

from collections.abc import Sequence

import numpy as np

from lora_jax.config import VisionConfig


def rope_positions(
    config: VisionConfig,
    has_sections: bool,
    images: Sequence[tuple[int, tuple[int, int]]],
    length: int,
) -> np.ndarray:
    """Return int32 [3, length]: positions of a sequence's tokens, also of those not sampled yet.

    `images` are the first token and the grid of patches of each, in order. A text token has three
    equal positions; an image that starts at p has (p, p + row, p + column), and what follows it
    goes on at p + max(rows, columns). Without sections a position is the token's index.
    """
    out = np.empty((3, length), np.int32)
    token = position = 0
    for start, grid in images if has_sections else ():
        out[:, token:start] = np.arange(position, position + start - token)
        position += start - token
        rows, columns = (n // config.merge_size for n in grid)
        at = np.indices((rows, columns)).reshape(2, -1)
        token = start + rows * columns
        out[0, start:token] = position
        out[1:, start:token] = position + at
        position += max(rows, columns)
    out[:, token:] = np.arange(position, position + length - token)
    return out
