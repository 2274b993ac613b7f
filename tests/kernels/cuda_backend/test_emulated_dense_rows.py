"""Dense maps of a batch, the CUDA kernel's own code on a CPU."""

import shutil

import jax
import jax.numpy as jnp
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


def run(library, x, weights, count, bias=None, addends=(None, None), gated=False, ahead=False):
    """Return the products of rows up to `count`, or the gated one; the others are no numbers."""
    x = x.copy()
    x[count:] = np.nan
    ys = [np.full((len(x), len(w)), np.nan, BF16) for w in weights[: 1 if gated else 3]]
    three = [*weights, None, None][:3], [*ys, None, None][:3]
    widths = [len(w) for w in weights] + [0] * (3 - len(weights))
    sizes = np.array([len(x), x.shape[1], count, gated, *widths, ahead], np.int32)
    wide = addends[0] is not None and addends[0].dtype == np.float32
    call(library.dense_rows, x, *three[0], bias, *addends, int(wide), *three[1], sizes)
    for y in ys:
        assert not y[count:].astype(np.float32).any()
    return [y[:count].astype(np.float32) for y in ys]


def product(x, w, bias=0) -> np.ndarray:
    """Return rows' products in float32, rounded once."""
    return (x.astype(np.float32) @ w.astype(np.float32).T + bias).astype(BF16).astype(np.float32)


@pytest.mark.parametrize(
    ("rows", "count", "d_out", "d_in"),
    [
        (12, 9, 136, 320),  # a box of 16 rows, tiles of 48 of which the last is not full
        (128, 64, 24, 1024),  # one warpgroup is idle; tiles of 16 take four blocks at a time
        (128, 100, 448, 192),  # tiles of 112; stages of the rows of two
        (96, 65, 264, 128),  # tiles of 80
        (64, 0, 64, 64),  # nobody
    ],
)
@pytest.mark.parametrize("ahead", [False, True])
def test_product_matches_float32(library, rows, count, d_out, d_in, ahead):
    library.emulate(4, 3)
    x, w, bias, addend = drawn(0, rows, d_in), drawn(1, d_out, d_in), drawn(2, d_out), None
    addend = drawn(3, rows, d_out).astype(np.float32 if ahead else BF16)
    (got,) = run(library, x, [w], count, bias, (addend, None), ahead=ahead)
    want = product(x[:count], w, bias.astype(np.float32)) + addend[:count].astype(np.float32)
    np.testing.assert_allclose(got, want, **CLOSE)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("count", "d_out"), [(40, 56), (70, 304)])
def test_gated_product_matches_float32(library, count, d_out, added):
    library.emulate(4, 3)
    x, pair = drawn(0, 72, 256), [drawn(seed, d_out, 256) for seed in (1, 2)]
    addends = [drawn(seed, 72, d_out) for seed in (3, 4)] if added else (None, None)
    (got,) = run(library, x, pair, count, addends=addends, gated=True)
    gate, up = (product(x[:count], w) for w in pair)
    if added:
        gate, up = (
            (a + b[:count].astype(np.float32)).astype(BF16).astype(np.float32)
            for a, b in zip((gate, up), addends, strict=True)
        )
    np.testing.assert_allclose(got, np.asarray(jax.nn.silu(jnp.asarray(gate))) * up, **CLOSE)


def test_maps_of_one_launch_have_the_bits_that_each_has_alone(library):
    """As q, k and v; more tiles than SMs, of the widest."""
    x, weights = drawn(0, 20, 192), [drawn(seed, 240 // seed, 192) for seed in (1, 2, 3)]
    library.emulate(2, 3)
    together = run(library, x, weights, 17)
    library.emulate(16, 3)
    for got, w in zip(together, weights, strict=True):
        (alone,) = run(library, x, [w], 17)
        np.testing.assert_array_equal(got, alone)
        np.testing.assert_allclose(got, product(x[:17], w), **CLOSE)


def test_a_row_has_the_same_bits_in_any_company(library):
    library.emulate(4, 3)
    x, w = drawn(0, 128, 192), drawn(1, 144, 192)
    (all_rows,) = run(library, x, [w], 128)
    for rows, count in ((64, 50), (128, 10), (9, 9)):
        (some,) = run(library, x[:rows], [w], count)
        np.testing.assert_array_equal(some, all_rows[:count])
