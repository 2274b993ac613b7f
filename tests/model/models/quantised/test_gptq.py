"""GPTQ's and AWQ's tensors: what is refused by name."""

import dataclasses
import re

import numpy as np
import pytest
from support.cases.quantised_checkpoints import one_map
from support.oracles.quantised_files import random_gptq, store

from lora_jax.models.quantised import with_quantised


def without(name: str):
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def zeros_of(value: int):
    def change(tensors):
        number = np.uint32(0x11111111 * value).view(np.int32)
        return tensors | {"qzeros": np.full_like(tensors["qzeros"], number)}

    return change


REFUSED = {
    "weight is packed and lacks scales, qzeros": (
        "gptq",
        lambda t: {n: t[n] for n in ("qweight", "g_idx")},
    ),
    "a.b.g_idx: groups in the order of activations (desc_act)": (
        "gptq",
        lambda t: t | {"g_idx": t["g_idx"][::-1].copy()},
    ),
    "16 rows of 120 weights do not divide into eights and groups of 32": (
        "gptq",
        lambda t: t | {"qweight": t["qweight"][:15].copy()},
    ),
    "a.b.qweight (16, 12): 12 rows of 128 weights do not divide into eights": (
        "gptq",
        lambda t: t | {"qweight": t["qweight"][:, :12].copy()},
    ),
    "a.b.scales is float16 (2, 16), expected float16 (4, 16)": (
        "gptq",
        lambda t: t | {"scales": t["scales"][:2].copy()},
    ),
    "a.b.qzeros is int64 (4, 2), expected int32 (4, 2)": (
        "gptq",
        lambda t: t | {"qzeros": t["qzeros"].astype(np.int64)},
    ),
    "a.b.scales is int32 (4, 16), expected float32 (4, 16)": (
        "gptq",
        lambda t: t | {"scales": np.ones((4, 16), np.int32)},
    ),
    "a.b.qweight (256,): 0 rows of 0 weights do not divide": (
        "gptq",
        lambda t: t | {"qweight": t["qweight"].ravel()},
    ),
    "a symmetric matrix has zero points other than 8": ("gptq", zeros_of(6)),
    "a.b.qzeros holds 15: libraries disagree": ("gptq zeros", zeros_of(15)),
    "lacks qzeros": ("awq", without("qzeros")),
    "a.b.qzeros is int32 (1, 2), expected int32 (2, 2)": (
        "awq",
        lambda t: t | {"qzeros": t["qzeros"][:1].copy()},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name(tmp_path, message):
    form, change = REFUSED[message]
    tensors = change(store(form, (16, 128), np.random.default_rng(0)).tensors)
    files, config = one_map(tmp_path, form, tensors)
    with pytest.raises(ValueError, match=re.escape(message)):
        with_quantised(files, config, np.dtype(np.float32))


def test_scales_that_are_no_numbers_are_refused_by_name(tmp_path):
    tensors = store("awq", (16, 128), np.random.default_rng(0)).tensors
    tensors["scales"][1, 3] = np.inf
    files, config = one_map(tmp_path, "awq", tensors)
    matrix = with_quantised(files, config, np.dtype(np.float32))["a.b.weight"]
    with pytest.raises(ValueError, match=r"a\.b\.scales holds values that are not finite"):
        matrix.rows_of("scales", range(2))


def test_negative_scales_are_values_of_the_format(tmp_path):
    """AutoRound writes them for symmetric matrices."""
    stored = store("gptq", (16, 128), np.random.default_rng(0))
    files, config = one_map(
        tmp_path, "gptq", stored.tensors | {"scales": -stored.tensors["scales"]}
    )
    out = np.empty((16, 128), np.float32)
    with_quantised(files, config, np.dtype(np.float32))["a.b.weight"].read(
        (range(16), range(128)), out
    )
    np.testing.assert_array_equal(out, -stored.values)


def test_an_unknown_order_of_columns_is_refused_by_name(tmp_path):
    """desc_act without g_idx, which one scale for a whole row would not need."""
    tensors = without("g_idx")(store("gptq", (16, 128), np.random.default_rng(0)).tensors)
    files, config = one_map(tmp_path, "gptq", tensors)
    config = dataclasses.replace(config, desc_act=True)
    with pytest.raises(ValueError, match=r"desc_act, and without a\.b\.g_idx"):
        with_quantised(files, config, np.dtype(np.float32))


@pytest.mark.parametrize("with_g_idx", [False, True])
def test_whole_rows_have_one_scale_and_no_order(tmp_path, with_g_idx):
    """group_size -1, with desc_act: a permutation of columns changes no scale."""
    stored = random_gptq((16, 128), np.random.default_rng(0), group=128)
    tensors = stored.tensors if with_g_idx else without("g_idx")(stored.tensors)
    files, config = one_map(tmp_path, "gptq", tensors)
    config = dataclasses.replace(config, desc_act=True, group_size=None)
    found = with_quantised(files, config, np.dtype(np.float32))["a.b.weight"]
    assert found.form.group_size == 128
    out = np.empty((16, 128), np.float32)
    found.read((range(16), range(128)), out)
    np.testing.assert_array_equal(out, stored.values)


def test_zero_points_of_the_second_format_may_be_15(tmp_path):
    tensors = store("gptq v2", (16, 128), np.random.default_rng(0)).tensors
    files, config = one_map(tmp_path, "gptq v2", zeros_of(15)(tensors))
    found = with_quantised(files, config, np.dtype(np.float32))["a.b.weight"]
    assert (found.rows_of("zeros", range(2)) == 15).all()
