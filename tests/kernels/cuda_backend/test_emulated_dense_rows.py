"""Dense maps of a batch, the CUDA kernel's own code on a CPU."""

import shutil

import ml_dtypes
import numpy as np
import pytest
from support.doubles.cuda_emulator import call
from support.oracles.tolerance import TOLERANCE

pytestmark = [
    pytest.mark.long,  # test_emulated.py has a case of the emulator
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
DRIVER = "dense_rows.cc"
BF16 = ml_dtypes.bfloat16
CLOSE = TOLERANCE["bfloat16"]


def drawn(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.5).astype(BF16)


def run(library, x, weights, count, bias=None, addend=None):
    """Return the products of rows up to `count`; the others are no numbers."""
    x = x.copy()
    x[count:] = np.nan
    ys = [np.full((len(x), len(w)), np.nan, BF16) for w in weights]
    given, results = ([*some, None, None][:3] for some in (weights, ys))
    widths = [len(w) for w in weights] + [0] * (3 - len(weights))
    sizes = np.array([len(x), x.shape[1], count, *widths], np.int32)
    wide = addend is not None and addend.dtype == np.float32
    call(library.dense_rows, x, *given, bias, addend, int(wide), *results, sizes)
    for y in ys:
        assert not y[count:].astype(np.float32).any()
    return [y[:count].astype(np.float32) for y in ys]


def product(x, w, bias=0) -> np.ndarray:
    """Return rows' products in float32, rounded once."""
    return (x.astype(np.float32) @ w.astype(np.float32).T + bias).astype(BF16).astype(np.float32)


@pytest.mark.parametrize(
    ("rows", "count", "d_out", "d_in"),
    [
        (12, 9, 136, 320),  # a box of 16 rows, tiles of 48 of which the last are not full
        (128, 64, 24, 1024),  # one warpgroup is idle; tiles of 16 take four blocks at a time
        (128, 100, 120, 192),  # tiles of 32, two at a time; half a stage is left
        (96, 65, 136, 128),
        (64, 0, 64, 64),  # nobody
        (72, 64, 24, 1536),  # six steps: stages are used again, five of them beside an idle one
        (72, 70, 24, 1536),  # or four of them
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_product_matches_float32(library, rows, count, d_out, d_in, dtype):
    library.emulate(4, 3)
    x, w, bias = drawn(0, rows, d_in), drawn(1, d_out, d_in), drawn(2, d_out)
    addend = drawn(3, rows, d_out).astype(dtype)
    (got,) = run(library, x, [w], count, bias, addend)
    want = product(x[:count], w, bias.astype(np.float32)) + addend[:count].astype(np.float32)
    np.testing.assert_allclose(got, want, **CLOSE)


def test_maps_of_one_launch_have_the_bits_that_each_has_alone(library):
    """As q, k and v, by more tiles than SMs of the widest; a map alone has tiles of 16."""
    x, weights = drawn(0, 80, 192), [drawn(seed, 240 // seed, 192) for seed in (1, 2, 3)]
    for count in (17, 70):
        library.emulate(2, 3)
        together = run(library, x, weights, count)
        library.emulate(16, 3)
        for got, w in zip(together, weights, strict=True):
            (alone,) = run(library, x, [w], count)
            np.testing.assert_array_equal(got, alone)
            np.testing.assert_allclose(got, product(x[:count], w), **CLOSE)


def test_a_row_has_the_same_bits_in_any_company(library):
    library.emulate(4, 3)
    x, w = drawn(0, 128, 192), drawn(1, 144, 192)
    (all_rows,) = run(library, x, [w], 128)
    for rows, count in ((64, 50), (128, 10), (9, 9)):
        (some,) = run(library, x[:rows], [w], count)
        np.testing.assert_array_equal(some, all_rows[:count])
