"""Attention between the patches of an image, the CUDA kernel's own code on a CPU."""

import shutil

import ml_dtypes
import numpy as np
import pytest
from support.doubles.cuda_emulator import call
from support.oracles.tolerance import TOLERANCE

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
DRIVER = "images.cc"
BF16 = ml_dtypes.bfloat16
HEADS, DIM, SCALE = 2, 72, 72**-0.5


def drawn(patches: int, seed: int = 0) -> list[np.ndarray]:
    """Return q, k and v, bfloat16 [patches, heads, dim]."""
    rng = np.random.default_rng(seed)
    return [(2 * rng.standard_normal((patches, HEADS, DIM))).astype(BF16) for _ in range(3)]


def run(library, q, k, v, count: int) -> np.ndarray:
    out = np.full(q.shape, np.nan, BF16)
    call(library.image_attention, q, k, v, out, len(q), HEADS, count, SCALE)
    return out


def oracle(q, k, v, count: int) -> np.ndarray:
    """Return the answer in float64; rows past the image are 0."""
    wide = [a[:count].astype(np.float64) for a in (q, k, v)]
    scores = np.einsum("qhd,khd->hqk", *wide[:2]) * SCALE
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.zeros(q.shape)
    out[:count] = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), wide[2])
    return out


@pytest.mark.parametrize(("patches", "count"), [(64, 64), (64, 37), (384, 300), (512, 385)])
def test_matches_float64(library, patches, count):
    """Fewer patches than a block, whole blocks and parts; padding of queries and keys."""
    library.emulate(3, 7)
    q, k, v = drawn(patches)
    q[count:] = k[count:] = np.nan  # v's padding is zeros, as the caller makes it
    v[count:] = 0
    got = run(library, q, k, v, count)
    want = oracle(q, k, v, count)
    np.testing.assert_allclose(got.astype(np.float64), want, **TOLERANCE["bfloat16"])
    assert not got[count:].astype(np.float32).any()


def test_bits_do_not_depend_on_the_bucket(library):
    library.emulate(3, 11)
    q, k, v = drawn(512)
    v[200:] = 0
    small = run(library, *(a[:256].copy() for a in (q, k, v)), 200)
    large = run(library, q, k, v, 200)
    np.testing.assert_array_equal(small[:200].view(np.int16), large[:200].view(np.int16))


def test_no_patches_give_zeros(library):
    q, k, v = drawn(64)
    assert not run(library, q, k, v, 0).astype(np.float32).any()
