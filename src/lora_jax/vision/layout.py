"""Order, positions and padding of a tower's patches, computed on the host. No jax.

A tower takes each image alone, in a bucket of patches; what an array holds behind the image's own
patches is never read.
"""

import dataclasses
import functools

import numpy as np

from lora_jax.config import VisionConfig
from lora_jax.vision.processor import Patches

_SMALLEST = 64  # patches of a bucket
_FACTOR = 4
_MULTIPLE = 256
_LEAST_CUT, _PIECES = 4096, 4  # patches of a bucket whose patches come in so many pieces


@dataclasses.dataclass(frozen=True, eq=False)
class TowerArrays:
    """One image for a tower of `bucket` patches; see nn.vision.TowerInputs for the meaning."""

    patches: tuple[np.ndarray, ...]  # uint8 [bucket, 3 x size x size], in pieces
    positions: np.ndarray  # int32 [bucket, 2]
    valid: np.ndarray  # bool [bucket]
    num_patches: np.ndarray  # int32 []
    cells: np.ndarray  # int32 [bucket / merge^2]
    table_rows: np.ndarray  # int32 [bucket, 4]
    table_weights: np.ndarray  # f32 [bucket, 4]


def buckets(config: VisionConfig, max_patches: int) -> tuple[int, ...]:
    """Return the numbers of patches that programs are compiled for: 64, 256, 1024, ..., the most.

    `max_patches` is what `tower_patches` gives for the largest image.
    """
    if config.image_size:
        return ((config.image_size // config.patch_size) ** 2,)
    sizes, bucket = [], _SMALLEST
    while bucket < max_patches:
        sizes.append(bucket)
        bucket *= _FACTOR
    most = -(-max_patches // _MULTIPLE) * _MULTIPLE if max_patches > _SMALLEST else _SMALLEST
    return (*sizes, most) if most not in sizes else tuple(sizes)


def bucket_cells(config: VisionConfig, bucket: int) -> int:
    """Return how many rows of the language model a bucket of patches can become."""
    return bucket // config.merge_size**2


def num_tokens(config: VisionConfig, grid: tuple[int, int]) -> int:
    """Return how many rows of the language model an image becomes."""
    return grid[0] * grid[1] // config.merge_size**2


def tower_patches(config: VisionConfig, grid: tuple[int, int]) -> int:
    """Return the patches a tower computes for an image, with those that fill up its windows."""
    if not config.window_size:
        return grid[0] * grid[1]
    order = _window_order(config, grid)
    return order.size * config.merge_size**2


def most_patches(config: VisionConfig, max_tokens: int) -> int:
    """Return the most patches of any image of up to `max_tokens` rows."""
    if config.image_size:
        return (config.image_size // config.patch_size) ** 2
    merge, cells = config.merge_size, max_tokens
    if config.window_size:  # an image of one cell's width fills a window's row with one cell
        cells *= config.window_size // (config.patch_size * merge)
        cells += (config.window_size // (config.patch_size * merge)) ** 2
    return cells * merge**2


def arrange(config: VisionConfig, image: Patches, bucket: int) -> TowerArrays:
    """Return the arrays of an image, padded to a bucket that holds it. They are not to be written.

    Frames of one size share all of them but the patches. Those of a large image are in pieces, and
    the whole ones are the image's own memory: copies to a device go faster side by side.
    """
    places, rows = _places(config, image.grid, bucket)
    pixels = image.pixels if rows is None else image.pixels[rows]
    size = bucket if bucket < _LEAST_CUT else -(-bucket // _PIECES)
    parts = ((pixels[n : n + size], min(size, bucket - n)) for n in range(0, bucket, size))
    pieces = tuple(part if len(part) == rows else _padded(part, rows) for part, rows in parts)
    return dataclasses.replace(places, patches=pieces)


def several(arrays: TowerArrays, images: int) -> TowerArrays:
    """Return the arrays, but for the patches, of so many images of one size in a row."""
    shift = np.arange(images, dtype=np.int32)[:, None] * len(arrays.cells)
    tiled = {
        name: np.concatenate([getattr(arrays, name)] * images)
        for name in ("positions", "valid", "table_rows", "table_weights")
    }
    return dataclasses.replace(
        arrays,
        patches=(),
        num_patches=arrays.num_patches + np.int32((images - 1) * len(arrays.valid)),
        cells=(arrays.cells[None] + shift).reshape(-1),
        **tiled,
    )


@functools.lru_cache(maxsize=32)
def _places(
    config: VisionConfig, grid: tuple[int, int], bucket: int
) -> tuple[TowerArrays, np.ndarray | None]:
    """Return the arrays of any image of a grid, without patches, and the order of its patches.

    None for the order in which they come.
    """
    unit = config.merge_size**2
    cells = np.arange(num_tokens(config, grid), dtype=np.int32)
    order = _window_order(config, grid) if config.window_size else cells
    rows = (order[:, None] * unit + np.arange(unit)).reshape(-1)  # of the image's patches
    real = np.repeat(order >= 0, unit)
    rows = np.where(real, rows, 0)
    if len(rows) > bucket:
        raise ValueError(f"An image of {len(rows)} patches does not fit into {bucket}.")
    back = np.zeros(len(cells), np.int32)
    back[order[order >= 0]] = np.flatnonzero(order >= 0)
    positions = block_positions(grid, config.merge_size)
    table_rows = np.zeros((len(positions), 4), np.int32)
    table_weights = np.zeros((len(positions), 4), np.float32)
    if config.family == "qwen3_vl":
        table_rows, table_weights = table_taps(positions, grid, round(config.num_positions**0.5))
    places = TowerArrays(
        patches=(),
        positions=_padded(positions[rows], bucket),
        valid=_padded(real, bucket),
        num_patches=np.array(len(rows), np.int32),
        cells=_padded(back, bucket // unit),
        table_rows=_padded(table_rows[rows], bucket),
        table_weights=_padded(table_weights[rows], bucket),
    )
    return places, rows if config.window_size else None


def block_positions(grid: tuple[int, int], merge: int) -> np.ndarray:
    """Return int32 [patches, 2]: row and column of each patch, in blocks of merge x merge."""
    rows, columns = np.meshgrid(*(np.arange(n, dtype=np.int32) for n in grid), indexing="ij")
    shape = (grid[0] // merge, merge, grid[1] // merge, merge)
    return np.stack(
        [a.reshape(shape).transpose(0, 2, 1, 3).reshape(-1) for a in (rows, columns)], 1
    )


def table_taps(
    positions: np.ndarray, grid: tuple[int, int], side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of a side x side table and their weights: bilinear, corners on corners.

    Both are [patches, 4]; all is computed in float32, as transformers does.
    """
    taps, weights = [], []
    for axis in range(2):
        span = np.float32(max(grid[axis] - 1, 1))
        at = positions[:, axis].astype(np.float32) * np.float32(side - 1) / span
        low = np.floor(at)
        offsets = np.arange(2, dtype=np.float32)
        taps.append(np.clip(low[:, None].astype(np.int32) + np.arange(2), 0, side - 1))
        distance = np.abs(at[:, None] - low[:, None] - offsets)
        weights.append(np.maximum(np.float32(1) - distance, np.float32(0)))
    rows = taps[0][:, :, None] * side + taps[1][:, None, :]
    products = weights[0][:, :, None] * weights[1][:, None, :]
    return rows.reshape(-1, 4).astype(np.int32), products.reshape(-1, 4).astype(np.float32)


def _window_order(config: VisionConfig, grid: tuple[int, int]) -> np.ndarray:
    """Return int32 [cells of all windows]: the image's cells window by window, -1 where none is."""
    size = config.window_size // (config.patch_size * config.merge_size)
    high, wide = (n // config.merge_size for n in grid)
    cells = np.full((-(-high // size) * size, -(-wide // size) * size), -1, np.int32)
    cells[:high, :wide] = np.arange(high * wide, dtype=np.int32).reshape(high, wide)
    cut = cells.reshape(cells.shape[0] // size, size, cells.shape[1] // size, size)
    return cut.transpose(0, 2, 1, 3).reshape(-1)


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    out = np.zeros((size, *values.shape[1:]), values.dtype)
    out[: len(values)] = values
    return out
