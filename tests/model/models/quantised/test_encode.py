"""Encoders: the nearest code for every weight, read back by the loaders of the same formats."""

import numpy as np
import pytest
from support.cases.quantised_checkpoints import one_map
from support.oracles.quantised_files import NF4_TABLE

from lora_jax.models.quantised import encode, with_quantised

FORMATS = {"nf4": "nf4 nested", "fp8": "fp8 block", "int4": "int4"}
# Relative rms error of normal weights, a little above those of the formats themselves.
ERRORS = {"nf4": 0.095, "fp8": 0.028, "int4": 0.100}


def matrix() -> np.ndarray:
    w = np.random.default_rng(0).standard_normal((200, 192)).astype(np.float32)
    w[:, 64:128] *= 4  # other scales
    w[3] = 0
    return w


def read_back(folder, name: str, w: np.ndarray) -> np.ndarray:
    encoded, _ = encode.encoder(name, {32})
    files, config = one_map(folder, FORMATS[name], encoded(w))
    out = np.empty(w.shape, np.float32)
    found = with_quantised(files, config, np.dtype(np.float32))["a.b.weight"]
    found.read(tuple(range(n) for n in w.shape), out)
    return out


@pytest.mark.parametrize("name", FORMATS)
def test_values_come_back_within_the_formats_error(tmp_path, name):
    w = np.random.default_rng(1).standard_normal((256, 256)).astype(np.float32)
    got = read_back(tmp_path, name, w)
    error = np.sqrt(np.mean((got - w) ** 2) / np.mean(w**2))
    assert 0.5 * ERRORS[name] < error < ERRORS[name]


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zero_and_scales_do_not_mix(tmp_path, name):
    """Large columns stand in other blocks than those that are compared."""
    w = matrix()
    got = read_back(tmp_path, name, w)
    assert not got[3].any()
    part = slice(128, 192)
    small = np.abs(got[:, part] - w[:, part]).max() / np.abs(w[:, part]).max()
    assert small < 0.2


def test_a_block_of_zeros_has_a_scale_that_is_a_number():
    w = np.zeros((128, 256), np.float32)
    w[:, 128:] = 2
    stored = encode.fp8(w)
    assert stored["weight_scale_inv"][0, 0] == 1
    assert not stored["weight"][:, :128].astype(np.float32).any()


def test_a_code_of_nf4_is_the_nearest_one(tmp_path):
    values = np.random.default_rng(2).uniform(-1, 1, 1000).astype(np.float32)
    want = np.abs(values[:, None] - NF4_TABLE[None]).min(axis=1)
    got = np.abs(values - NF4_TABLE[encode.nearest(NF4_TABLE, values)])
    np.testing.assert_array_equal(got, want)


def test_the_dynamic_map_is_signed_and_ascending():
    table = encode.dynamic_map()
    assert table.shape == (256,)
    assert (np.diff(table) > 0).all()
    assert (table[-1], np.count_nonzero(table == 0)) == (1, 1)
    np.testing.assert_array_equal(table[:127], -table[254:127:-1])


def test_the_largest_weight_has_the_largest_code():
    """FP8's is 448; int4 reaches -8, with a scale of 2 / 15 of the range."""
    w = np.array([[-15.0, *range(-14, 16, 2), *[0] * 16]] * 2, np.float32)
    tensors = encode.int4(w, 32)
    codes = (tensors["weight_packed"].view(np.uint8)[..., None] >> np.array([0, 4])) & 15
    assert tensors["weight_scale"].astype(np.float32).tolist() == [[2], [2]]
    np.testing.assert_array_equal(codes.reshape(2, 32), [[*range(16), *[8] * 16]] * 2)
    tensors = encode.fp8(w)
    assert tensors["weight_scale_inv"] == np.float32(15 / 448)
    assert tensors["weight"][0, 0] == -448


def test_which_maps_fit():
    """FP8 takes whole blocks, or one block of a smaller side."""
    for shape, names in (
        ((100, 96), ["fp8", "int4"]),
        ((100, 64), ["fp8", "int4", "nf4"]),
        ((256, 384), ["fp8", "int4", "nf4"]),
        ((192, 384), ["int4", "nf4"]),
        ((384, 192), ["int4", "nf4"]),
        ((128, 16), ["fp8"]),
        ((128, 120), []),
    ):
        assert [name for name in encode.FORMATS if encode.fits(name, shape)] == names
        assert all("columns in multiples" in encode.needs(name) for name in encode.FORMATS)


def test_int4_takes_the_largest_group_that_divides_every_map():
    for widths, group in (({256, 128}, 128), ({128, 192}, 64), ({128, 96}, 32)):
        _, section = encode.encoder("int4", widths)
        weights = section([])["config_groups"]["group_0"]["weights"]
        assert weights["group_size"] == group
