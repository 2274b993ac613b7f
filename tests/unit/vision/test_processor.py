"""Patches against transformers' PIL processors, pixel for pixel, and digests that tell apart."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lora_jax.config import VisionConfig
from lora_jax.vision.processor import image_digest, preprocess, read_settings

SIZES = ((64, 64), (33, 217), (480, 640), (1, 180), (301, 299))


def config(family: str, patch: int = 16, merge: int = 2, side: int = 0) -> VisionConfig:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8}
    times = 1 if side else 2
    return VisionConfig(
        family=family,
        **sizes,
        patch_size=patch,
        temporal_patch_size=times,
        merge_size=merge,
        out_size=8,
        norm_eps=1e-6,
        image_token_id=3,
        image_size=side,
    )


FAMILIES: dict[str, tuple[VisionConfig, Any, dict[str, Any]]] = {
    "qwen3_vl": (
        config("qwen3_vl"),
        Qwen2VLImageProcessorPil,
        {
            "patch_size": 16,
            "size": {"shortest_edge": 65536, "longest_edge": 16777216},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
    ),
    "qwen2_5_vl": (
        config("qwen2_5_vl", patch=14),
        Qwen2VLImageProcessorPil,
        {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
    ),
    "clip": (
        config("clip", patch=14, merge=1, side=336),
        CLIPImageProcessorPil,
        {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    ),
}


def write(folder: Path, settings: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(settings))
    return folder


def picture(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_are_those_of_transformers(name: str, tmp_path: Path):
    vision, oracle, settings = FAMILIES[name]
    ours = read_settings(write(tmp_path, settings), vision)
    processor = oracle(**settings)
    for size in SIZES:
        image = picture(*size)
        want = processor(images=[image], return_tensors="np", input_data_format="channels_last")
        patches = preprocess(image, ours)
        got = patches.normalised(ours)
        if name == "clip":
            high = 336 // 14
            cut = got.reshape(high, high, 3, 14, 14).transpose(2, 0, 3, 1, 4)
            np.testing.assert_array_equal(cut.reshape(3, 336, 336), want["pixel_values"][0])
        else:
            np.testing.assert_array_equal(got, want["pixel_values"])
            assert [1, *patches.grid] == want["image_grid_thw"][0].tolist()


def test_files_of_both_ages_and_none_agree(tmp_path: Path):
    vision = config("qwen3_vl")
    none = read_settings(tmp_path, vision)
    old = read_settings(write(tmp_path, {"min_pixels": 65536, "max_pixels": 16777216}), vision)
    nested = {"image_processor": {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}}
    (tmp_path / "new").mkdir()
    new = read_settings(write(tmp_path / "new", nested, "processor_config.json"), vision)
    assert none == old == new
    assert read_settings(tmp_path, vision, {"max_pixels": 70000}).max_pixels == 70000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch_size": 14}, "patch_size is 14, not 16"),
        ({"resample": 2}, "resample is 2"),
        ({"do_normalize": False}, "do_normalize"),
        ({"rescale_factor": 0.5}, "rescale_factor"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"min_pixels": -1}, "min_pixels is -1"),
        ({"min_pixels": 9, "max_pixels": 4}, "bounds are 9 to 4"),
    ],
)
def test_settings_that_are_not_done_are_refused_by_name(tmp_path: Path, settings, message):
    with pytest.raises(ValueError, match=message):
        read_settings(write(tmp_path, settings), config("qwen3_vl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"preprocessor_config.json of .*: Expecting property name"),
        ("[1]", "preprocessor_config.json of .* is not an object"),
    ],
)
def test_files_that_are_no_settings_are_refused_by_name(tmp_path: Path, text, message):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_settings(tmp_path, config("qwen3_vl"))


def test_a_model_of_one_image_size_refuses_another(tmp_path: Path):
    vision = config("clip", 14, 1, 336)
    with pytest.raises(ValueError, match=r"crop_size is 224; this model takes \{'height': 336"):
        read_settings(write(tmp_path, {"crop_size": 224}), vision)
    settings = read_settings(write(tmp_path, {"crop_size": 336}), vision)
    assert settings.grid_of(30, 40) == (24, 24)


def test_unknown_arguments_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="known are min_pixels"):
        read_settings(tmp_path, config("qwen3_vl"), {"fps": 2})
    with pytest.raises(ValueError, match="all have one size"):
        read_settings(tmp_path, config("clip", 14, 1, 336), {"max_pixels": 2})


def test_digests_tell_shape_pixels_and_settings_apart(tmp_path: Path):
    settings = read_settings(tmp_path, config("qwen3_vl"))
    image = picture(4, 6)
    other = image.copy()
    other[0, 0, 0] ^= 1
    more = dataclasses.replace(settings, max_pixels=1 << 20)
    found = {
        image_digest(image, settings),
        image_digest(image.reshape(6, 4, 3), settings),
        image_digest(other, settings),
        image_digest(image, more),
    }
    assert len(found) == 4
    assert image_digest(image[:, ::-1][:, ::-1], settings) == image_digest(image, settings)
