"""FP8 tensors: where scales may stand, and what is refused by name."""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.cases.quantised_checkpoints import one_map
from support.oracles.quantised_files import random_fp8

from lora_jax.config import QuantizationConfig
from lora_jax.models.checkpoint import SINGLE, Checkpoint
from lora_jax.models.quantised import with_quantised
from lora_jax.models.sources import Oriented, Slice, Tensor, Transpose

FLOAT32 = np.dtype(np.float32)


def read(folder, form: str, tensors, shape=(130, 200)) -> np.ndarray:
    files, config = one_map(folder, form, tensors)
    out = np.empty(shape, np.float32)
    found = with_quantised(files, config, FLOAT32)
    found["a.b.weight"].read((range(shape[0]), range(shape[1])), out)
    return out


BLOCK = {"block": (128, 128), "scales": "weight_scale_inv"}


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
    tensors |= {"activation_scale": np.full((), 3, np.float32)}  # as transformers calls it
    np.testing.assert_array_equal(read(tmp_path, "fp8 tensor", tensors), one.values)
    files, config = one_map(tmp_path, "fp8 tensor", tensors)
    assert list(with_quantised(files, config, FLOAT32).tensors) == ["a.b.weight"]


def test_scales_may_be_powers_of_two_of_one_byte(tmp_path):
    one = case(**BLOCK)
    powers = np.array([[120, 0], [127, 118]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    wide = (2.0 ** np.array([[-7, -127], [0, -9]])).repeat(128, 0).repeat(128, 1)[:130, :200]
    want = one.tensors["weight"].astype(np.float32) * wide.astype(np.float32)
    np.testing.assert_array_equal(
        read(tmp_path, "fp8 block", one.tensors | {"weight_scale_inv": powers}), want
    )
    powers[1, 1] = np.nan
    with pytest.raises(ValueError, match="weight_scale_inv holds values that are not finite"):
        read(tmp_path, "fp8 block", one.tensors | {"weight_scale_inv": powers})


def test_blocks_need_not_be_square(tmp_path):
    one = case(block=(64, 128))
    files, config = one_map(tmp_path, "fp8 block", one.tensors)
    config = dataclasses.replace(config, block=(64, 128))
    out = np.empty((130, 200), np.float32)
    with_quantised(files, config, FLOAT32)["a.b.weight"].read((range(130), range(200)), out)
    np.testing.assert_array_equal(out, one.values)


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


def stack_of(folder, block, tensors) -> tuple[Checkpoint, np.ndarray]:
    """Write experts `x`, three of 136 x 72; return the checkpoint and their e4m3 values."""
    codes = np.random.default_rng(0).integers(0, 120, (3, 136, 72)).astype(np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn)
    save_file(
        {"x": values, "x_activation_scale": np.ones(3, np.float32)} | tensors, folder / SINGLE
    )
    config = QuantizationConfig("fp8", "fp8", block=block)
    return with_quantised(Checkpoint(folder), config, FLOAT32), values.astype(np.float32)


@pytest.mark.parametrize(
    ("block", "shape"), [((128, 64), (3, 2, 2)), (None, (3,)), (None, (3, 1, 1)), (None, (3, 2, 1))]
)
def test_experts_in_one_tensor_straight_and_transposed(tmp_path, block, shape):
    scales = 2.0 ** -np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    files, values = stack_of(tmp_path, block, {"x_scale_inv": scales})
    assert list(files.tensors) == ["x"]
    grid = scales.reshape(3, *(shape[1:] or (1, 1)))
    rows, columns = block or (136 // grid.shape[1], 72)
    want = values * grid.repeat(rows, 1).repeat(columns, 2)[:, :136, :72]
    for source, whole in (
        (Tensor("x"), want),
        (Transpose(Tensor("x")), want.swapaxes(1, 2)),
        (Slice(Transpose(Tensor("x")), 1, 1, 71, 2), want.swapaxes(1, 2)[:, 1:71:2]),
        (Oriented(Tensor("x"), (72, 136), Tensor("x"), (1, 2)), want.swapaxes(1, 2)),
    ):
        assert source.shape(files) == whole.shape
        out = np.empty(whole.shape, np.float32)
        source.read(files, tuple(range(n) for n in whole.shape), out)
        np.testing.assert_array_equal(out, whole)
        form = source.form(files)
        assert form is not None
        box = (range(1, 3), range(3, whole.shape[1], 2))
        parts = {}
        for part, (size, dtype) in form.parts(whole.shape).items():
            parts[part] = np.empty((2, len(box[1]), size[2]), dtype)
            source.read_part(files, part, (*box, range(size[2])), parts[part])
        for place, expert in enumerate(box[0]):
            got = form.values({name: part[place] for name, part in parts.items()})
            np.testing.assert_array_equal(got, whole[expert, 3::2])


def test_scales_of_experts_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"x_scale_inv is .* 128 x 128 needs floats \(3, 2, 1\)"):
        stack_of(tmp_path, (128, 128), {"x_scale_inv": np.ones((3, 2), np.float32)})
    with pytest.raises(
        ValueError, match=r"no blocks needs floats \(3,\) or \(3, 1, 1\) or \(3, 2, 1"
    ):
        stack_of(tmp_path, None, {"x_scale_inv": np.ones((1,), np.float32)})
    with pytest.raises(ValueError, match=r"x is F8_E4M3 \(3, 136, 72\) with 0 scales; .*x_scale"):
        stack_of(tmp_path, None, {})
    one = np.ones((1,), np.float32)
    for shape in ((4,), (0, 4), (1, 2, 3, 4)):
        odd = {"x": np.zeros(shape, ml_dtypes.float8_e4m3fn), "x_scale": one}
        with pytest.raises(ValueError, match=r"with 1 scales; it needs two axes, or three for exp"):
            stack_of(tmp_path, None, odd)
    odd = {"x": np.zeros((3, 5, 8), ml_dtypes.float8_e4m3fn), "x_scale": np.ones((3, 2, 1), "f4")}
    with pytest.raises(ValueError, match=r"no blocks needs floats \(3,\) or \(3, 1, 1\)\.$"):
        stack_of(tmp_path, None, odd)


def test_experts_that_are_turned_twice_are_as_stored(tmp_path):
    files, values = stack_of(tmp_path, None, {"x_scale_inv": np.ones(3, np.float32)})
    out = np.empty(values.shape, np.float32)
    files["x"].turned().turned().read(tuple(range(n) for n in values.shape), out)
    np.testing.assert_array_equal(out, values)
