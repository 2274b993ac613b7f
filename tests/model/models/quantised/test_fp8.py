"""FP8 tensors: where scales may stand, and what is refused by name."""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
from support.cases.quantised_checkpoints import one_map
from support.oracles.quantised_files import random_fp8

from lora_jax.models.quantised import with_quantised

FLOAT32 = np.dtype(np.float32)


def read(folder, form: str, tensors, shape=(130, 200)) -> np.ndarray:
    files, config = one_map(folder, form, tensors)
    out = np.empty(shape, np.float32)
    found = with_quantised(files, config, FLOAT32)
    found["a.b.weight"].read((range(shape[0]), range(shape[1])), out)
    return out


def case(**options):
    return random_fp8((130, 200), np.random.default_rng(0), **options)


def test_scales_of_a_row_or_a_matrix_in_any_shape_and_float(tmp_path):
    rows = case(block=(1, 200))
    flat = rows.tensors | {"weight_scale": rows.tensors["weight_scale"][:, 0].copy()}
    np.testing.assert_array_equal(read(tmp_path, "fp8 channel", flat), rows.values)
    narrow = flat["weight_scale"].astype(ml_dtypes.bfloat16)
    want = rows.tensors["weight"].astype(np.float32) * narrow.astype(np.float32)[:, None]
    got = read(tmp_path, "fp8 channel", flat | {"weight_scale": narrow})
    np.testing.assert_array_equal(got, want)
    one = case()
    single = one.tensors | {"weight_scale": one.tensors["weight_scale"].reshape(1)}
    np.testing.assert_array_equal(read(tmp_path, "fp8 tensor", single), one.values)


def test_the_scale_of_activations_is_not_used(tmp_path):
    one = case()
    tensors = one.tensors | {"input_scale": np.full((), 3, np.float32)}
    np.testing.assert_array_equal(read(tmp_path, "fp8 tensor", tensors), one.values)
    files, config = one_map(tmp_path, "fp8 tensor", tensors)
    assert list(with_quantised(files, config, FLOAT32).tensors) == ["a.b.weight"]


def test_blocks_need_not_be_square(tmp_path):
    one = case(block=(64, 128))
    files, config = one_map(tmp_path, "fp8 block", one.tensors)
    config = dataclasses.replace(config, block=(64, 128))
    out = np.empty((130, 200), np.float32)
    with_quantised(files, config, FLOAT32)["a.b.weight"].read((range(130), range(200)), out)
    np.testing.assert_array_equal(out, one.values)


BLOCK = {"block": (128, 128), "scales": "weight_scale_inv"}
REFUSED = {
    "with 0 scales; it needs two axes": lambda t: {"weight": t["weight"]},
    "with 2 scales": lambda t: t | {"weight_scale": np.ones(1, np.float32)},
    "is float32 (1, 2); a.b.weight (130, 200) with blocks of 128 x 128 needs floats (2, 2)": (
        lambda t: t | {"weight_scale_inv": t["weight_scale_inv"][:1].copy()}
    ),
    "is uint8 (2, 2)": lambda t: t | {"weight_scale_inv": np.ones((2, 2), np.uint8)},
    "is float64 (2, 2), expected float32 (2, 2)": (
        lambda t: t | {"weight_scale_inv": np.ones((2, 2), np.float64)}
    ),
    "values that are not finite": (
        lambda t: t | {"weight_scale_inv": np.full((2, 2), np.inf, np.float32)}
    ),
    "a.b.weight holds NaN": lambda t: (
        t | {"weight": np.full((130, 200), 255, np.uint8).view(ml_dtypes.float8_e4m3fn)}
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name(tmp_path, message):
    tensors = REFUSED[message](case(**BLOCK).tensors)
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, "fp8 block", tensors)


def test_blocks_that_the_config_does_not_name_are_refused(tmp_path):
    tensors = case(block=(64, 64)).tensors
    with pytest.raises(ValueError, match=r"no blocks needs floats \(\) or \(1,\) or \(130, 1\)"):
        read(tmp_path, "fp8 tensor", tensors)
