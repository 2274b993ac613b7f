"""Forms of quantised matrices: the values on the host are those of the device's weight."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from lora_jax.models.quantised import forms
from lora_jax.models.quantised.forms import CodedForm, ScaledForm

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("name", ["NF4", "FP4", "E2M1", "SIGNED", "UNSIGNED"])
def test_tables_have_sixteen_values_of_float32(name):
    table = getattr(forms, name)
    assert len(table) == 16
    assert np.array_equal(np.array(table, np.float32), np.array(table))


@pytest.mark.parametrize("zeros", [False, True])
def test_coded_values_are_those_of_the_device(zeros):
    form = CodedForm(forms.UNSIGNED if zeros else forms.NF4, 64, forms.BFLOAT16, zeros)
    shapes = form.parts((6, 256))
    assert shapes["scales"] == ((6, 4), forms.BFLOAT16)
    parts = {n: RNG.integers(0, 99, s).astype(np.uint8) for n, (s, _) in shapes.items()}
    parts["scales"] = RNG.random((6, 4)).astype(ml_dtypes.bfloat16)
    weight = form.weight({n: jnp.asarray(a) for n, a in parts.items()}, (6, 256), np.float32)
    weight.check("w")
    np.testing.assert_array_equal(np.asarray(weight.plain()), form.values(parts))
    if zeros:
        signed = dataclasses.replace(weight, zeros=weight.zeros.astype(jnp.int8))
        with pytest.raises(ValueError, match="w: want uint8 zeros of 0 to 15, got int8"):
            signed.check("w")


def test_scaled_values_are_those_of_the_device():
    form = ScaledForm(128)
    assert form.parts((6, 200))["scales"] == ((6, 2), forms.FLOAT32)
    values = RNG.integers(0, 127, (6, 200)).astype(np.uint8).view(forms.FLOAT8)
    parts = {"values": values, "scales": RNG.random((6, 2)).astype(np.float32)}
    weight = form.weight({n: jnp.asarray(a) for n, a in parts.items()}, (6, 200), np.float32)
    weight.check("w")
    np.testing.assert_array_equal(np.asarray(weight.plain()), form.values(parts))


def test_packing_puts_even_columns_in_the_low_half():
    assert forms.pack(np.array([[1, 2, 3, 15]], np.uint8)).tolist() == [[0x21, 0xF3]]


def test_rows_are_made_plain_in_chunks():
    found = list(forms.chunks(range(3, 1000, 2), 1 << 20))
    assert [place for place, _ in found[:3]] == [0, 4, 8]
    assert [row for _, chunk in found for row in chunk] == list(range(3, 1000, 2))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_scales_whose_products_overflow_are_refused_by_name(dtype):
    """2**119 is the largest power of two whose product with 448 is a finite bfloat16."""
    fits = np.array([[1, 2.0**119]], dtype)
    assert forms.finite(fits, "x.scale", 448) is fits
    with pytest.raises(ValueError, match=r"x\.scale holds a scale of magnitude .* times 448"):
        forms.finite(np.array([[1, 2.0**120]], dtype), "x.scale", 448)
    with pytest.raises(ValueError, match=r"x\.scale holds values that are not finite"):
        forms.finite(np.array([1, np.nan], dtype), "x.scale")


def test_only_magnitudes_may_not_be_negative():
    scales = np.array([0.5, -0.25], np.float32)
    assert forms.finite(scales, "x.scales", 8) is scales
    with pytest.raises(ValueError, match=r"x\.absmax holds -0\.25: .* not negative"):
        forms.magnitudes(scales, "x.absmax")
    assert forms.magnitudes(np.zeros(0, np.float32), "x.absmax").size == 0
