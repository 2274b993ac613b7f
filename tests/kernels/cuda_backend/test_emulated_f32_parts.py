"""A router's logits by tensor cores, from weights in three parts: the kernel's code on a CPU."""

import shutil

import ml_dtypes
import numpy as np
import pytest
from support.doubles.cuda_emulator import call

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
DRIVER = "layers.cc"
BF16 = ml_dtypes.bfloat16
CHOSEN, FEW, *TILES = range(-1, 4)  # PartsForm: tiles of 8, 16, 32 and 64 rows


def f32_parts(library, x, w, live, bias=None, form=CHOSEN):
    y = np.full((len(x), len(w)), np.nan, np.float32)
    shape, rows = np.array((*x.shape[:1], *w.shape, form), np.int32), np.array([live], np.int32)
    call(library.f32_parts, x, w, rows, bias, shape, y)
    return y


def drawn(rows, d_out, d_in, dtype=np.float32):
    rng = np.random.default_rng(rows)
    x, w = rng.standard_normal((rows, d_in)).astype(BF16), rng.standard_normal((d_out, d_in))
    return x, w.astype(dtype).astype(np.float32), rng.standard_normal(d_out).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(
    ("rows", "live", "d_out", "d_in"), [(3, 3, 5, 544), (37, 20, 19, 64), (70, 70, 40, 1056)]
)
def test_products_are_those_of_float64_in_every_form(library, rows, live, d_out, d_in, dtype):
    """Rows that do not count give zeros; a d_in of few units leaves slices empty."""
    x, w, bias = drawn(rows, d_out, d_in, dtype)
    wide = x[:live].astype(np.float64) @ w.T.astype(np.float64) + bias
    want = f32_parts(library, x, w, live, bias, TILES[0])
    np.testing.assert_allclose(want[:live], wide, rtol=2e-6, atol=2e-5)
    assert not want[live:].any()
    for form in (CHOSEN, *TILES, *([FEW] if rows <= 8 else [])):
        np.testing.assert_array_equal(f32_parts(library, x, w, live, bias, form), want)


def test_a_row_has_the_same_bits_alone(library):
    x, w, bias = drawn(70, 24, 1024)
    whole = f32_parts(library, x, w, 70, bias)
    for row in (0, 15, 16, 69):
        np.testing.assert_array_equal(f32_parts(library, x[[row]], w, 1, bias)[0], whole[row])


def test_all_bits_of_a_weight_count(library):
    """One product for each result, so that nothing is rounded but the product itself."""
    rng = np.random.default_rng(0)
    x, w = np.zeros((8, 512), BF16), rng.standard_normal((16, 512)).astype(np.float32)
    columns = rng.integers(0, 512, 8)
    x[np.arange(8), columns] = 1
    np.testing.assert_array_equal(f32_parts(library, x, w, 8), w[:, columns].T)
