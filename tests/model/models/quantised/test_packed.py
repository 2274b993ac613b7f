"""compressed-tensors' packed tensors: what is refused by name."""

import dataclasses
import re

import numpy as np
import pytest
from support.cases.quantised_checkpoints import one_map
from support.oracles.quantised_files import store

from lora_jax.models.quantised import with_quantised
from lora_jax.models.quantised.packed import nibbles


def without(name: str):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


REFUSED = {
    "weight is packed and lacks weight_scale": ("int4", without("weight_scale")),
    "lacks weight_shape": ("int4", without("weight_shape")),
    "lacks weight_zero_point": ("int4 zeros", without("weight_zero_point")),
    "groups in the order of activations (actorder)": (
        "int4",
        lambda t: t | {"weight_g_idx": np.zeros(128, np.int32)},
    ),
    "weight_shape is [-16, -128], not two positive sizes": (
        "int4",
        lambda t: t | {"weight_shape": np.array([-16, -128])},
    ),
    "weight_scale is uint8 (16, 4), expected float32 (16, 4)": (
        "int4",
        lambda t: t | {"weight_scale": np.ones((16, 4), np.uint8)},
    ),
    "a.b.weight_zero_point: a symmetric matrix has zero points other than 8": (
        "int4",
        lambda t: t | {"weight_zero_point": np.zeros((2, 4), np.int32)},
    ),
    "weight_shape is [0, 128], not two positive sizes": (
        "int4",
        lambda t: t | {"weight_shape": np.array([0, 128])},
    ),
    "weight_shape is float32 (2,), not two integers": (
        "int4",
        lambda t: t | {"weight_shape": np.array([16, 128], np.float32)},
    ),
    "weight_shape is int64 (3,), not two integers": (
        "int4",
        lambda t: t | {"weight_shape": np.ones(3, np.int64)},
    ),
    "100 columns do not divide into groups of 32": (
        "int4",
        lambda t: t | {"weight_shape": np.array([16, 100])},
    ),
    "weight_packed is int32 (16, 16), expected int32 (16, 20)": (
        "int4",
        lambda t: t | {"weight_shape": np.array([16, 160])},
    ),
    "weight_scale is float32 (16, 2), expected float32 (16, 4)": (
        "int4",
        lambda t: t | {"weight_scale": np.ones((16, 2), np.float32)},
    ),
    "weight_zero_point is int32 (1, 2), expected int32 (2, 2)": (
        "int4 zeros",
        lambda t: t | {"weight_zero_point": t["weight_zero_point"][:1].copy()},
    ),
    "weight_packed is int32 (4, 4), expected uint8 (4, 4)": (
        "mxfp4",
        lambda t: t | {"weight_packed": np.ones((4, 4), np.int32)},
    ),
    "weight_scale is uint8 (16, 3), expected uint8 (16, 4)": (
        "mxfp4",
        lambda t: t | {"weight_scale": np.ones((16, 3), np.uint8)},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name(tmp_path, message):
    form, change = REFUSED[message]
    tensors = change(store(form, (16, 128), np.random.default_rng(0)).tensors)
    files, config = one_map(tmp_path, form, tensors)
    with pytest.raises(ValueError, match=re.escape(message)):
        with_quantised(files, config, np.dtype(np.float32))


def test_zero_points_of_rows_that_fill_no_number(tmp_path):
    stored = store("int4 zeros", (12, 128), np.random.default_rng(0))
    files, config = one_map(tmp_path, "int4 zeros", stored.tensors)
    matrix = with_quantised(files, config, np.dtype(np.float32))["a.b.weight"]
    out = np.empty((12, 128), np.float32)
    matrix.read((range(12), range(128)), out)
    np.testing.assert_array_equal(out, stored.values)


def test_columns_that_fill_no_number_are_refused_by_name(tmp_path):
    tensors = store("int4", (16, 128), np.random.default_rng(0)).tensors
    files, config = one_map(tmp_path, "int4", tensors | {"weight_shape": np.array([16, 100])})
    config = dataclasses.replace(config, group_size=4)
    with pytest.raises(ValueError, match="100 columns do not divide into groups of 4"):
        with_quantised(files, config, np.dtype(np.float32))


def test_zero_points_that_change_nothing_are_taken(tmp_path):
    tensors = store("int4", (16, 128), np.random.default_rng(0)).tensors
    middle = np.full((2, 4), 0x88888888 - (1 << 32), np.int32)
    more = {"weight_zero_point": middle, "input_scale": np.ones(1, np.float32)}
    files, config = one_map(tmp_path, "int4", tensors | more)
    found = with_quantised(files, config, np.dtype(np.float32))
    assert list(found.tensors) == ["a.b.weight"]
    assert not found["a.b.weight"].form.zeros


def test_scales_that_are_no_numbers_are_refused_by_name(tmp_path):
    for form, wrong in (("int4", np.nan), ("int4", 1e38), ("mxfp4", 255)):
        tensors = store(form, (16, 128), np.random.default_rng(0)).tensors
        tensors["weight_scale"][3, 1] = wrong
        folder = tmp_path / f"{form} {wrong}"
        folder.mkdir()
        files, config = one_map(folder, form, tensors)
        matrix = with_quantised(files, config, np.dtype(np.float32))["a.b.weight"]
        matrix.rows_of("scales", range(3))
        with pytest.raises(ValueError, match=r"a\.b\.weight_scale"):
            matrix.rows_of("scales", range(2, 4))


def test_nibbles_run_from_the_low_bits_up():
    numbers = np.array([[0x76543210, -1], [8, 0]], np.int32)
    want = [[0, 1, 2, 3, 4, 5, 6, 7, *[15] * 8], [8, *[0] * 15]]
    assert nibbles(numbers).tolist() == want
