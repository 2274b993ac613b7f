"""The kernels of a tower, their own code on a CPU: attention between patches, dense maps."""

import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.doubles.cuda_emulator import call
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.rotary import rotate

pytestmark = [
    pytest.mark.long,  # test_emulated.py has a case of the emulator
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
DRIVER = "images.cc"
BF16 = ml_dtypes.bfloat16
DIM, SCALE = 72, 72**-0.5


def drawn(patches: int, heads: int = 2, seed: int = 0) -> list[np.ndarray]:
    """Return qkv, bfloat16 [patches, 3, heads, dim], and cos and sin of angles."""
    rng = np.random.default_rng(seed)
    angles = rng.standard_normal((patches, DIM // 2)).astype(np.float32)
    qkv = (2 * rng.standard_normal((patches, 3, heads, DIM))).astype(BF16)
    return [qkv, np.cos(angles), np.sin(angles)]


def run(library, qkv, cos, sin, count: int) -> np.ndarray:
    patches, _, heads, _ = qkv.shape
    out = np.full((patches, heads, DIM), np.nan, BF16)
    call(library.turned_attention, qkv, cos, sin, out, patches, heads, count, SCALE)
    return out


def oracle(qkv, cos, sin, count: int) -> np.ndarray:
    """Return the answer in float64 of q and k turned and rounded; rows past the image are 0."""
    q, k, v = (jnp.asarray(qkv[:count, part]) for part in range(3))
    angles = jnp.asarray(cos[:count]), jnp.asarray(sin[:count])
    wide = [np.asarray(a, np.float64) for a in (rotate(q, *angles), rotate(k, *angles), v)]
    scores = np.einsum("qhd,khd->hqk", *wide[:2]) * SCALE
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.zeros((len(qkv), *q.shape[1:]))
    out[:count] = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), wide[2])
    return out


@pytest.mark.parametrize(
    ("patches", "count", "heads"),
    [(64, 64, 2), (64, 37, 1), (384, 300, 2), (512, 385, 2), (16, 16, 89)],
    ids=["few keys", "padding", "two tiles", "an empty tile", "whole tiles"],
)
def test_attention_matches_float64(library, patches, count, heads):
    """Tiles that are cut and, where they are more than two thirds of a turn, that are not."""
    library.emulate(3, 7)
    given = drawn(patches, heads)
    given[0][count:] = np.nan
    got = run(library, *given, count)
    want = oracle(*given, count)
    np.testing.assert_allclose(got.astype(np.float64), want, **TOLERANCE["bfloat16"])
    assert not got[count:].astype(np.float32).any()


def test_attention_s_bits_do_not_depend_on_the_bucket(library):
    library.emulate(3, 11)
    qkv, cos, sin = drawn(512)
    small = run(library, *(a[:256].copy() for a in (qkv, cos, sin)), 200)
    large = run(library, qkv, cos, sin, 200)
    np.testing.assert_array_equal(small[:200].view(np.int16), large[:200].view(np.int16))


def test_attention_of_no_patches_gives_zeros(library):
    assert not run(library, *drawn(64), 0).astype(np.float32).any()


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "count"),
    [(200, 208, 136, 195), (400, 24, 64, 1), (520, 400, 584, 500)],
)
def test_dense_matmul_is_the_composed_one(library, rows, d_out, d_in, count, gelu, added):
    """Parts of tiles in every direction, rows that are none; a CTA has several tiles."""
    library.emulate(2, 5)
    rng = np.random.default_rng(d_out)
    x, w, bias, addend = (
        rng.standard_normal(shape).astype(BF16)
        for shape in ((rows, d_in), (d_out, d_in), (d_out,), (rows, d_out))
    )
    x[count:] = np.nan
    y = np.full((rows, d_out), np.nan, BF16)
    sizes = np.array([rows, d_out, d_in, count, gelu], np.int32)
    call(library.dense_matmul, x, w, bias, addend if added else None, sizes, y)
    want = (x[:count].astype("f4") @ w.astype("f4").T + bias.astype("f4")).astype(BF16)
    if gelu:
        want = np.asarray(jax.nn.gelu(want.astype("f4"), approximate=True)).astype(BF16)
    want = want.astype("f4") + (addend[:count].astype("f4") if added else 0)
    np.testing.assert_allclose(y[:count].astype("f4"), want, rtol=2e-2, atol=8e-2)
    assert not y[count:].astype("f4").any()
