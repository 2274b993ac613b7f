"""Products for groups of few rows, the CUDA kernel's own code on a CPU."""

import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.doubles.cuda_emulator import call
from support.oracles.tolerance import TOLERANCE

from lora_jax.models.quantised.forms import E2M1, NF4, SIGNED, UNSIGNED
from lora_jax.ops.grouped_matmul.weights import FRAGMENTS, in_fragments, unpacked

pytestmark = [
    pytest.mark.long,  # test_emulated.py has a case of the emulator
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]
DRIVER = "few_rows.cc"
BF16 = ml_dtypes.bfloat16
SIZES = (0, 3, 0, 9, 17, 1)  # rows of groups; two more are in none
ROWS = sum(SIZES) + 2
HALF, FULL = np.float16, np.float32  # float32 scales that float16 ones were, and others
# coding, bits, weights that share a scale, dtype of scales, table; UNSIGNED has zero points
CODINGS = {
    "float8": (0, 8, 128, np.float32, None),
    "int4": (1, 4, 128, BF16, SIGNED),
    "int4 of 64": (1, 4, 64, BF16, SIGNED),
    "mxfp4": (2, 4, 32, BF16, E2M1),
    "nf4": (3, 4, 64, np.float32, NF4),
    "plain": (4, 16, 128, BF16, None),
    "nf4 of 128": (3, 4, 128, np.float32, NF4),
    "nf4 of rows": (3, 4, 0, np.float32, NF4),
    "gptq": (5, 4, 128, HALF, SIGNED),
    "awq": (5, 4, 128, HALF, UNSIGNED),
    "awq of 64": (5, 4, 64, HALF, UNSIGNED),
    "awq of 32": (5, 4, 32, HALF, UNSIGNED),
    "gptq of rows": (5, 4, 0, HALF, SIGNED),
    "int4 in float32": (5, 4, 128, FULL, UNSIGNED),
    "int4 with zeros": (5, 4, 128, BF16, UNSIGNED),
    "int4 of 32": (5, 4, 32, BF16, SIGNED),
}


def drawn(name: str, d_out: int, d_in: int, seed: int, largest=0.25, groups=6) -> tuple:
    """Return weights as stored, scales, zeros and plain values in float32, rounded to bfloat16."""
    _, bits, group, scale_dtype, table = CODINGS[name]
    group = group or d_in
    rng = np.random.default_rng(seed)
    if name == "plain":
        stored = (rng.standard_normal((groups, d_out, d_in)) * 0.25).astype(BF16)
        none = np.zeros((groups, d_out, d_in // group), BF16)
        return stored, none, None, stored.astype(np.float32)
    scales = (0.01 + rng.random((groups, d_out, d_in // group)) * largest).astype(scale_dtype)
    scales = scales.astype(np.float32) if scale_dtype is HALF else scales
    zeros = None
    wide = np.repeat(scales.astype(np.float32), group, axis=-1)
    if bits == 8:
        stored = rng.standard_normal((groups, d_out, d_in)).astype(ml_dtypes.float8_e4m3fn)
        values = stored.astype(np.float32)
    else:
        codes = rng.integers(0, 16, (groups, d_out, d_in)).astype(np.uint8)
        by_rows = codes[..., ::2] | codes[..., 1::2] << 4
        stored, values = (
            np.asarray(in_fragments(jnp.asarray(by_rows))),
            np.array(table, np.float32)[codes],
        )
        if table is UNSIGNED:
            zeros = rng.integers(0, 16, scales.shape).astype(np.uint8)
            values = values - np.repeat(zeros.astype(np.float32), group, axis=-1)
    return stored, scales, zeros, (values * wide).astype(BF16).astype(np.float32)


def run(
    library,
    name,
    x,
    weights,
    d_out,
    bias=None,
    addends=(None, None),
    group_sizes=SIZES,
    second=None,
):
    """Return the product; with two weights the gated one, or `second` becomes the other's."""
    coding, *_, table = CODINGS[name]
    y = np.full((len(x), d_out), np.nan, BF16)
    (gate, gate_scales, gate_zeros, _), *others = weights
    up, up_scales, up_zeros = others[0][:3] if others else (None, None, None)
    packed = np.zeros(16, np.float32) if table is None else np.array(table, np.float32)
    first = 0 if table is UNSIGNED else -8
    shape = np.array(
        (len(x), len(group_sizes), d_out, x.shape[1], gate_scales.shape[-1], first), np.int32
    )
    narrow = int(gate_scales.dtype == BF16)
    wide = addends[0] is not None and addends[0].dtype == np.float32
    counts = np.array(group_sizes, np.int32)
    scaling = (gate_scales, up_scales, gate_zeros, up_zeros, narrow, packed)
    args = (x, gate, up, *scaling, counts, bias, *addends)
    call(library.few_rows, *args, int(wide), y, second, int(second is None), shape, coding)
    return y


def products(x, plain, group_sizes=SIZES):
    """Return float32 products of rows with their groups' plain weights; 0 for rows in none."""
    y, start = np.zeros((len(x), plain.shape[1]), np.float32), 0
    for g, size in enumerate(group_sizes):
        rows = slice(start, start + size)
        y[rows] = x[rows].astype(np.float32) @ plain[g].T
        start += size
    return y


@pytest.mark.parametrize("name", CODINGS)
def test_product_matches_float32(library, name):
    """Bias and addend; a d_in that no stage divides, a d_out that no tile does."""
    library.emulate(2, 3)
    d_out, d_in = 136, 512 if name == "int4" else 384  # pairs of scales in bfloat16 are copied
    rng = np.random.default_rng(0)
    x, bias = (
        rng.standard_normal((ROWS, d_in)).astype(BF16),
        rng.standard_normal((len(SIZES), d_out)).astype(BF16),
    )
    weights = drawn(name, d_out, d_in, 1)
    addend = rng.standard_normal((ROWS, d_out)).astype(np.float32)
    got = run(library, name, x, [weights], d_out, bias, (addend, None))
    y = products(x, weights[3])
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    y[: len(owner)] += bias[owner].astype(np.float32)
    want = y.astype(BF16).astype(np.float32) + addend
    want[len(owner) :] = 0
    np.testing.assert_allclose(got.astype(np.float32), want, **TOLERANCE["bfloat16"])


@pytest.mark.parametrize("name", CODINGS)
def test_weights_have_their_values_bit_for_bit(library, name):
    """Each row of x has a single 1: a product is a column of the weights."""
    library.emulate(2, 3)
    d_out, d_in = 64, 512
    columns = np.random.default_rng(0).permutation(d_in)[:64]
    x = np.zeros((len(columns), d_in), BF16)
    x[np.arange(len(columns)), columns] = 1
    weights = drawn(name, d_out, d_in, 1, groups=1)
    got = run(library, name, x, [weights], d_out, group_sizes=(len(columns),))
    np.testing.assert_array_equal(got.astype(np.float32), weights[3][0].T[columns])


def test_one_wide_scale_of_a_warps_rows_is_seen(library):
    """In one of the four places that lanes look at: each of four warps has it in another."""
    library.emulate(2, 3)
    d_out, d_in, sizes = 128, 256, (9, 12)
    columns = d_in - 1 - np.arange(sum(sizes))  # of the last group
    x = np.zeros((len(columns), d_in), BF16)
    x[np.arange(len(columns)), columns] = 1
    stored, scales, zeros, _ = drawn("awq of 64", d_out, d_in, 1, groups=2)
    scales[:, (3, 32 + 11, 64 + 18, 96 + 31), -1] = 1.3 * 2.0**-129  # bfloat16 holds few bits
    codes = unpacked(jnp.asarray(stored), FRAGMENTS).astype(jnp.float32)
    by_group = np.asarray(codes).reshape(*scales.shape, 64) - zeros[..., None].astype(np.float32)
    plain = (by_group * scales[..., None]).reshape(2, d_out, d_in).astype(BF16)
    weights = stored, scales, zeros, plain
    got = run(library, "awq of 64", x, [weights], d_out, group_sizes=sizes)
    want = np.concatenate([plain[0].T[columns[:9]], plain[1].T[columns[9:]]])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", CODINGS)
def test_gated_product_matches_float32(library, name):
    library.emulate(2, 5)
    d_out, d_in = 128, 256
    x = np.random.default_rng(0).standard_normal((ROWS, d_in)).astype(BF16)
    weights = [drawn(name, d_out, d_in, seed, 4) for seed in (1, 2)]  # scales of 0.5 and more too
    got = run(library, name, x, weights, d_out)
    gate, up = (products(x, w[3]).astype(BF16).astype(np.float32) for w in weights)
    want = np.asarray(jax.nn.silu(jnp.asarray(gate))) * up
    np.testing.assert_allclose(got.astype(np.float32), want, **TOLERANCE["bfloat16"])


@pytest.mark.parametrize("name", CODINGS)
def test_one_group_matches_float32(library, name):
    """A dense map, and the one expert of a device: gate and up in one launch, too.

    On three SMs every tile of 64 columns has one, on two SMs every tile of 96.
    """
    d_out, d_in, sizes = 136, 512 if name == "int4" else 384, (11,)
    d_in = 320 if name == "plain" else d_in  # half a stage is left
    x = np.random.default_rng(0).standard_normal((13, d_in)).astype(BF16)
    weights = [drawn(name, d_out, d_in, seed, groups=1) for seed in (1, 2)]
    gate, up = (products(x, w[3], sizes).astype(BF16).astype(np.float32) for w in weights)
    for sms in (1, 2, 3):
        library.emulate(sms, 3)
        got = run(library, name, x, weights[:1], d_out, group_sizes=sizes)
        np.testing.assert_allclose(got.astype(np.float32), gate, **TOLERANCE["bfloat16"])
    got = run(library, name, x, weights, d_out, group_sizes=sizes)
    want = np.asarray(jax.nn.silu(jnp.asarray(gate))) * up
    np.testing.assert_allclose(got.astype(np.float32), want, **TOLERANCE["bfloat16"])


def test_two_matrices_in_one_launch(library):
    """As q and k; each has the bits that it has alone."""
    library.emulate(2, 5)
    d_out, d_in = 136, 512
    x = np.random.default_rng(0).standard_normal((ROWS, d_in)).astype(BF16)
    weights = [drawn("int4", d_out, d_in, seed) for seed in (1, 2)]
    second = np.full((ROWS, d_out), np.nan, BF16)
    first = run(library, "int4", x, weights, d_out, second=second)
    for got, w in zip((first, second), weights, strict=True):
        np.testing.assert_array_equal(got, run(library, "int4", x, [w], d_out))
