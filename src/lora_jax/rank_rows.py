"""Rank rows of adapters as pools hold them: in a float dtype, or in 8 bits with a scale. No jax.

A rank row in 8 bits is its values as int8 and a tail of 16 bytes, the first four of which are the
float32 scale that the values are multiplied with: scale = max|value| / 127, values to the nearest.
So a row of a width in steps of 16 begins at a multiple of 16 bytes, which a GPU reads at once. Row
and scale lie, are copied and are evicted together. A matrix of int8 is always one of such rows.
"""

from collections.abc import Mapping

import numpy as np

INT8 = np.dtype(np.int8)
TAIL_BYTES = 16  # behind the values
SCALE_BYTES = 4  # of them
_LARGEST = 127
_SCALE = slice(-TAIL_BYTES, SCALE_BYTES - TAIL_BYTES)  # its place in a row


def stored_width(width: int, dtype: np.dtype) -> int:
    """Return the items that a row of so many values takes."""
    return width + TAIL_BYTES if dtype == INT8 else width


def value_width(items: int, dtype: np.dtype) -> int:
    """Return the values of a row of so many items: the inverse of `stored_width`."""
    return items - TAIL_BYTES if dtype == INT8 else items


def rows_nbytes(rows: Mapping[int, int], itemsize: int) -> int:
    """Return the bytes of so many rows of each width; values of one byte are in 8 bits."""
    tail = TAIL_BYTES if itemsize == INT8.itemsize else 0
    return sum((width * itemsize + tail) * count for width, count in rows.items())


def quantised(matrix: np.ndarray) -> np.ndarray:
    """Return int8 [..., width + 16] of a finite matrix [..., width], each row by itself."""
    wide = matrix.astype(np.float32)
    scales = np.abs(wide).max(axis=-1, keepdims=True) / np.float32(_LARGEST)
    steps = np.divide(wide, scales, out=np.zeros_like(wide), where=scales > 0)
    # A scale below float32's normal numbers is inexact, and 127 steps may not reach the largest.
    steps = np.clip(np.rint(steps), -_LARGEST, _LARGEST)
    return joined(steps.astype(np.int8), scales[..., 0])


def joined(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return rows of int8 values [..., width] and their float32 scales [...]."""
    out = np.zeros((*values.shape[:-1], stored_width(values.shape[-1], INT8)), INT8)
    out[..., :-TAIL_BYTES] = values
    out[..., _SCALE] = np.ascontiguousarray(scales)[..., None].view(INT8)
    return out


def parts(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return values [..., width] and float32 scales [...] of rows in 8 bits."""
    scales = np.ascontiguousarray(matrix[..., _SCALE]).view(np.float32)
    return matrix[..., :-TAIL_BYTES], scales[..., 0]


def scaled(matrix: np.ndarray, *factors: float) -> np.ndarray:
    """Return the rows times the factors, one after the other: in float32, or still in 8 bits."""
    in_8_bits = matrix.dtype == INT8
    values, scales = parts(matrix) if in_8_bits else (matrix, matrix.astype(np.float32))
    for factor in factors:
        scales = scales * np.float32(factor)
    return joined(values, scales) if in_8_bits else scales
