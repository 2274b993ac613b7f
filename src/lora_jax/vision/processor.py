"""Pixels of an image to the patches that a tower takes; equal to transformers' PIL processors.

Settings are read from preprocessor_config.json, or from the newer processor_config.json.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lora_jax import strict_json
from lora_jax.config import VisionConfig
from lora_jax.vision.sizes import check_ratio, shortest_edge, smart_resize

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALVES = (0.5, 0.5, 0.5)
_RESCALE = 1 / 255
_FILES = ("preprocessor_config.json", "processor_config.json")
# What each processor must do, where its file says so.
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}
_KNOWN_KWARGS = ("min_pixels", "max_pixels", "size")


@dataclasses.dataclass(frozen=True)
class ProcessorSettings:
    """Everything that decides which patches an image becomes."""

    family: str
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int  # of the resized image
    max_pixels: int
    image_size: int  # side of the crop; 0: the image keeps its shape
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return rows and columns of patches of an image; ValueError for one too narrow."""
        check_ratio(height, width)
        if self.image_size:
            side = self.image_size // self.patch_size
            return side, side
        factor = self.patch_size * self.merge_size
        high, wide = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)
        return high // self.patch_size, wide // self.patch_size

    @property
    def values(self) -> np.ndarray:
        """f32 [3, 256]: what each pixel value of each channel becomes, (x / 255 - mean) / std."""
        scaled = (np.arange(256, dtype=np.float64) * _RESCALE).astype(np.float32)
        pairs = zip(self.mean, self.std, strict=True)
        return np.stack([(scaled - np.float32(m)) / np.float32(s) for m, s in pairs])

    @functools.cached_property
    def digest(self) -> bytes:
        """SHA-256 of the settings."""
        return hashlib.sha256(repr(dataclasses.astuple(self)).encode()).digest()


@dataclasses.dataclass(frozen=True, eq=False)
class Patches:
    """An image as it goes to its tower, which normalises it: an eighth of the bytes.

    `pixels` are uint8 [patches, 3 x size x size], each patch (channel, y, x); `grid` is how many
    rows and columns of patches there are.
    """

    pixels: np.ndarray
    grid: tuple[int, int]

    def normalised(self, settings: ProcessorSettings) -> np.ndarray:
        """Return f32 [patches, patch_dim], each patch (channel, time, y, x), as towers see it."""
        cut = self.pixels.reshape(len(self.pixels), 3, -1)
        values = settings.values[np.arange(3)[:, None], cut]
        times = (len(cut), 3, settings.temporal_patch_size, cut.shape[2])
        return np.broadcast_to(values[:, :, None], times).reshape(len(cut), -1)


def read_settings(
    folder: Path, config: VisionConfig, kwargs: Mapping[str, Any] | None = None
) -> ProcessorSettings:
    """Return the settings of a model folder; `kwargs` override its bounds of an image's size.

    Without a file the family's own are used. ValueError for settings that are not supported.
    """
    raw = _read(folder)
    _check_fixed(raw, config)
    clip = config.family == "clip"
    ours = config.family == "qwen3_vl"
    mean, std = ((_HALVES, _HALVES), (CLIP_MEAN, CLIP_STD))[not ours]
    low, high = (65536, 16777216) if ours else (3136, 12845056)
    low, high = _bounds(raw, low, high)
    if not clip:
        low, high = _bounds(_checked_kwargs(kwargs or {}), low, high)
    elif kwargs:
        raise ValueError("mm_processor_kwargs: images of this model all have one size.")
    if not 0 < low <= high:
        raise ValueError(f"The image processor's bounds are {low} to {high} pixels.")
    return ProcessorSettings(
        family=config.family,
        patch_size=config.patch_size,
        temporal_patch_size=config.temporal_patch_size,
        merge_size=config.merge_size,
        min_pixels=low,
        max_pixels=high,
        image_size=config.image_size,
        mean=_three(raw, "image_mean", mean),
        std=_three(raw, "image_std", std),
    )


def preprocess(pixels: np.ndarray, settings: ProcessorSettings) -> Patches:
    """Return the patches of an RGB image, uint8 [height, width, 3]; ValueError for one too narrow.

    Sizes follow from the settings, the filter is bicubic.
    """
    if settings.image_size:
        return _cropped(pixels, settings)
    grid = settings.grid_of(*pixels.shape[:2])
    size, merge = settings.patch_size, settings.merge_size
    image = _resized(pixels, grid[0] * size, grid[1] * size)
    cut = image.reshape(grid[0] // merge, merge, size, grid[1] // merge, merge, size, 3)
    cut = cut.transpose(0, 3, 1, 4, 6, 2, 5)
    return Patches(np.ascontiguousarray(cut).reshape(grid[0] * grid[1], -1), grid)


def image_digest(pixels: np.ndarray, settings: ProcessorSettings) -> bytes:
    """Return SHA-256 of mode, width, height, pixels and settings: equal ones give equal rows."""
    height, width = pixels.shape[:2]
    head = b"RGB" + width.to_bytes(8, "little") + height.to_bytes(8, "little")
    known = hashlib.sha256(settings.digest + head)
    known.update(np.ascontiguousarray(pixels))
    return known.digest()


def _cropped(pixels: np.ndarray, settings: ProcessorSettings) -> Patches:
    """Return CLIP's patches: the shorter side to the crop's size, then the centre, row by row."""
    side, size = settings.image_size, settings.patch_size
    height, width = pixels.shape[:2]
    check_ratio(height, width)
    high, wide = shortest_edge(height, width, side)
    top, left = (high - side) // 2, (wide - side) // 2
    image, count = _resized(pixels, high, wide), side // size
    image = image[top : top + side, left : left + side]
    cut = image.reshape(count, size, count, size, 3).transpose(0, 2, 4, 1, 3)
    return Patches(np.ascontiguousarray(cut).reshape(count * count, -1), (count, count))


def _resized(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return the image at a size; at its own size it is the one that is given, as Pillow has it."""
    if pixels.shape[:2] == (height, width):
        return pixels
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def _read(folder: Path) -> dict[str, Any]:
    """Return the image processor's part of the folder's file, {} where there is none."""
    for name in _FILES:
        if (folder / name).is_file():
            try:
                raw = strict_json.loads((folder / name).read_text())
            except (ValueError, UnicodeDecodeError) as error:
                raise ValueError(f"{name} of {folder.name}: {error}") from error
            nested = raw.get("image_processor") if isinstance(raw, dict) else None
            if not isinstance(nested or raw, dict):
                raise ValueError(f"{name} of {folder.name} is not an object.")
            if nested is not None or name == _FILES[0]:
                return nested or raw
    return {}


def _check_fixed(raw: Mapping[str, Any], config: VisionConfig) -> None:
    clip = config.family == "clip"
    wanted: dict[str, Any] = dict(_FIXED)
    if clip:
        side = config.image_size
        wanted |= {"do_center_crop": True}
        sizes = {
            "size": ({"shortest_edge": side}, side),
            "crop_size": ({"height": side, "width": side}, side),
        }
        for name, allowed in sizes.items():
            if raw.get(name) is not None and raw[name] not in allowed:
                raise ValueError(
                    f"The image processor's {name} is {raw[name]!r}; this model takes {allowed[0]}."
                )
    else:
        wanted |= {
            "patch_size": config.patch_size,
            "temporal_patch_size": config.temporal_patch_size,
            "merge_size": config.merge_size,
        }
    for name, value in wanted.items():
        if raw.get(name) is not None and raw[name] != value:
            raise ValueError(f"The image processor's {name} is {raw[name]!r}, not {value!r}.")
    factor = raw.get("rescale_factor")
    if factor is not None and factor != _RESCALE:
        raise ValueError(f"The image processor's rescale_factor is {factor!r}, not 1 / 255.")


def _checked_kwargs(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    unknown = sorted(set(kwargs) - set(_KNOWN_KWARGS))
    if unknown:
        known = ", ".join(_KNOWN_KWARGS)
        raise ValueError(f"mm_processor_kwargs has {unknown[0]!r}; known are {known}.")
    return kwargs


def _bounds(raw: Mapping[str, Any], low: int, high: int) -> tuple[int, int]:
    """Return the bounds of an image's area, in either spelling."""
    size = raw.get("size") if isinstance(raw.get("size"), Mapping) else {}
    assert size is not None
    bounds = []
    for old, new, default in (
        ("min_pixels", "shortest_edge", low),
        ("max_pixels", "longest_edge", high),
    ):
        value = raw.get(old) if raw.get(old) is not None else size.get(new)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"The image processor's {old} is {value!r}, not a positive integer.")
        bounds.append(value)
    return bounds[0], bounds[1]


def _three(raw: Mapping[str, Any], name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = raw.get(name)
    if value is None:
        return default
    good = isinstance(value, list) and len(value) == 3
    if not good or not all(type(x) in (int, float) for x in value):
        raise ValueError(f"The image processor's {name} is {value!r}, not three numbers.")
    return tuple(float(x) for x in value)
