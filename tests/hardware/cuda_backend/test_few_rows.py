"""Products for few rows on Hopper: the bits of Mosaic's kernel in every format, in any company."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.quantised_model import FORMATS
from cuda_backend import few_rows
from lora_jax.models.quantised.forms import SIGNED, UNSIGNED
from lora_jax.ops import dispatch
from lora_jax.ops.grouped_matmul import (
    CodedWeight,
    gated_matmul,
    grouped_matmul,
    joined_matmul,
    matmul,
)
from lora_jax.ops.grouped_matmul.orders import for_kernels
from lora_jax.ops.grouped_matmul.weights import FRAGMENTS
from lora_jax.ops.silu_times import gated_maps, silu_of_experts, silu_times

GROUPS, D_OUT, D_IN = 16, 768, 2048
SIZES = np.array([0, 3, 9, 17, 1, 0, 0, 40, 2, 0, 5, 8, 16, 0, 1, 4], np.int32)
ROWS = int(SIZES.sum()) + 6


def weights(name: str, seed: int, groups: int = GROUPS):
    w = jax.random.normal(jax.random.key(seed), (groups, D_OUT, D_IN), jnp.bfloat16) * D_IN**-0.5
    return jax.jit(FORMATS.get(name, lambda w: w))(w)


def grouped(kind: str, group: int, seed: int = 1, groups: int = GROUPS) -> CodedWeight:
    """Return int4 weights as libraries store them, whatever they stand for: any codes and scales.

    "half" are float16's scales in float32, "full" other float32 ones; "zeros" has zero points.
    """
    dtype, zeros = kind.split()[0], kind.endswith("zeros")
    keys = jax.random.split(jax.random.key(seed), 3)
    by_group = (groups, D_OUT, D_IN // group)
    scales = (jax.random.uniform(keys[1], by_group) + 0.01) * D_IN**-0.5 / 4
    if dtype == "half":  # subnormal ones too
        smaller = jax.random.randint(keys[2], by_group, 0, 9)
        scales = (scales * jnp.exp2(-smaller.astype(jnp.float32))).astype(jnp.float16)
    scales = scales.astype(jnp.bfloat16 if dtype == "bfloat16" else jnp.float32)
    codes = jax.random.bits(keys[0], (groups, D_OUT, D_IN // 2), jnp.uint8)
    points = jax.random.bits(keys[2], by_group, jnp.uint8) & 15 if zeros else None
    return CodedWeight(
        codes, scales, points, UNSIGNED if zeros else SIGNED, jnp.dtype(jnp.bfloat16)
    )


def rows(seed: int, width: int = D_IN, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), (ROWS, width), dtype)


def same_bits(got, want):
    got, want = (np.asarray(a).view(np.int16) for a in (got, want))
    np.testing.assert_array_equal(got, want)


def laid(args):
    """Return arguments with weights as the loader places them on a GPU."""
    return [for_kernels(arg, "gpu") for arg in args]


def check(op, *args):
    """CUDA's bits are Mosaic's, of codes in either order."""
    want = op(*args, implementation="pallas_gpu")
    same_bits(op(*laid(args), implementation="cuda"), want)
    same_bits(op(*laid(args), implementation="pallas_gpu"), want)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_products_have_the_bits_of_mosaics(name):
    """One product, and gate and up, beside addends of either dtype."""
    w, sizes = weights(name, 1), jnp.asarray(SIZES)
    check(grouped_matmul, rows(0), w, sizes, None, rows(4, D_OUT, jnp.float32))
    check(grouped_matmul, rows(0), w, sizes)
    pair = rows(0), w, weights(name, 2), sizes
    check(gated_matmul, *pair)
    check(gated_matmul, *pair, rows(4, D_OUT), rows(5, D_OUT))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_fewest_rows_have_the_bits_of_mosaics(name):
    """Groups of up to 9 rows, 4 in the mean, as in decoding."""
    sizes = jnp.asarray(np.where(SIZES == 40, 1, np.minimum(SIZES, 9)), jnp.int32)
    x, pair = rows(0)[: 4 * GROUPS], [weights(name, seed) for seed in (1, 2)]
    check(grouped_matmul, x, pair[0], sizes)
    check(gated_matmul, x, *pair, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [1, 61])
def test_dense_products_have_the_bits_of_mosaics(name, count):
    x, sizes = rows(0)[:count], jnp.array([count], jnp.int32)
    w, up = (weights(name, seed)[:1] for seed in (1, 2))
    check(grouped_matmul, x, w, sizes)
    check(gated_matmul, x, w, up, sizes)  # the one expert of a device


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_large_scales_have_the_bits_of_mosaics(name):
    w = weights(name, 1)
    check(grouped_matmul, rows(0), dataclasses.replace(w, scales=64 * w.scales), jnp.asarray(SIZES))


def check_against_plain(op, x, ws, *rest):
    """CUDA's bits are those of Mosaic's kernel with the arrays that weights stand for."""
    want = op(x, *(w.plain() for w in ws), *rest, implementation="pallas_gpu")
    same_bits(op(*laid([x, *ws]), *rest, implementation="cuda"), want)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128, D_IN])
@pytest.mark.parametrize(
    "kind", ["half", "half zeros", "full", "full zeros", "bfloat16", "bfloat16 zeros"]
)
def test_int4_of_any_library_has_the_bits_of_its_values(kind, group):
    """Experts in tiles of 16 and of 8 rows, gate and up, and dense maps of 64 rows and one."""
    w, up, x = grouped(kind, group), grouped(kind, group, 2), rows(0)
    check_against_plain(grouped_matmul, x, [w], jnp.asarray(SIZES))
    few = jnp.full((GROUPS,), 3, jnp.int32)
    check_against_plain(gated_matmul, x[: 4 * GROUPS], [w, up], few)
    for count in (1, 64):
        check_against_plain(grouped_matmul, x[:count], [w[:1]], jnp.array([count], jnp.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*FORMATS, "bfloat16", "half zeros"])
def test_several_tiles_a_cta_have_the_bits_of_their_values(name):
    """128 experts employ each CTA several times, in each of many launches."""
    some, named = np.random.default_rng(0).integers(0, 128, 512), name in FORMATS
    sizes = jnp.asarray(np.bincount(some, minlength=128), jnp.int32)
    made = [weights(name, s, 128) if named else grouped(name, 64, s, 128) for s in (1, 2)]
    x = jax.random.normal(jax.random.key(9), (512, D_IN), jnp.bfloat16)
    for op, ws, rest in ((grouped_matmul, made[:1], (sizes, None)), (gated_matmul, made, (sizes,))):
        want = op(x, *(w.plain() for w in ws), *rest, implementation="pallas_gpu")
        product = jax.jit(functools.partial(op, implementation="cuda"))
        for _ in range(20):
            same_bits(product(*laid([x, *ws]), *rest), want)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["half", "half zeros", "bfloat16"])
def test_int4_has_the_bits_of_mosaics(kind):
    check(grouped_matmul, rows(0), grouped(kind, 128), jnp.asarray(SIZES))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["half", "half zeros", "bfloat16"])
@pytest.mark.parametrize("groups", [1, 3, 7])
def test_odd_numbers_of_groups_have_the_bits_of_their_values(kind, groups):
    """Rows of 128, 384 and 896 weights, as the parts of devices are: scales are in no pairs."""
    w, x = grouped(kind, 128), rows(0, 128 * groups)
    zeros = None if w.zeros is None else w.zeros[..., :groups]
    codes, scales = w.codes[..., : 64 * groups], w.scales[..., :groups]
    w = CodedWeight(codes, scales, zeros, w.table, w.dtype)
    check_against_plain(grouped_matmul, x, [w], jnp.asarray(SIZES))
    check_against_plain(grouped_matmul, x[:61], [w[:1]], jnp.array([61], jnp.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e30])
def test_scales_of_any_size_have_the_bits_of_mosaics(scale):
    w, sizes = grouped("half zeros", 128), jnp.asarray(SIZES)
    wide = dataclasses.replace(w, scales=w.scales.at[:, ::7].multiply(scale))
    (laid_out,) = laid([wide])
    want = grouped_matmul(rows(0), laid_out, sizes, implementation="pallas_gpu")
    same_bits(grouped_matmul(rows(0), laid_out, sizes, implementation="cuda"), want)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [128, D_IN])
def test_tables_of_larger_groups_have_the_bits_of_their_values(group):
    w = weights("nf4", 1)
    w = dataclasses.replace(w, scales=w.scales[..., :: group // 64])
    check_against_plain(grouped_matmul, rows(0), [w], jnp.asarray(SIZES))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_maps_of_one_x_share_a_launch(name):
    """As q, k and v do; each has the bits that it has alone."""
    ws = [weights(name, seed)[0][: D_OUT // seed] for seed in (1, 2, 3)]
    x, *ws = laid([rows(0), *ws])
    bias = jax.random.normal(jax.random.key(9), (D_OUT // 2,), jnp.bfloat16)
    args, count = (None, bias, None), jnp.int32(50)
    for got, w, one in zip(
        joined_matmul(x, ws, count, args, implementation="cuda"), ws, args, strict=True
    ):
        same_bits(got, matmul(x, w, count, one, implementation="pallas_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "int4", "awq"])
def test_a_row_has_the_same_bits_in_any_company(name):
    x, w = laid([rows(0), weights(name, 1)])
    whole = grouped_matmul(x, w, jnp.asarray(SIZES), implementation="cuda")
    starts = np.cumsum(SIZES) - SIZES
    for group in (1, 7, 15):
        row = int(starts[group] + SIZES[group] - 1)
        alone = grouped_matmul(
            x[row : row + 1], w[group : group + 1], jnp.array([1], jnp.int32), implementation="cuda"
        )
        same_bits(alone[0], whole[row])
    assert not np.asarray(whole[SIZES.sum() :], np.float32).any()


@pytest.mark.gpu
def test_bias_and_a_hidden_size_that_no_stage_divides():
    """GPT-OSS's: 2880, scales of 32 in 4 bits."""
    w = jax.random.normal(jax.random.key(1), (GROUPS, 2880, 2880), jnp.bfloat16) / 54
    bias, x = jax.random.normal(jax.random.key(2), (GROUPS, 2880), jnp.bfloat16), rows(3, 2880)
    w = jax.jit(FORMATS["mxfp4"])(w)
    check(grouped_matmul, x, w, jnp.asarray(SIZES), bias)


def shaped(name: str, d_in: int = D_IN):
    """Return a format's weight without numbers, as it lies on a GPU."""
    like = jax.ShapeDtypeStruct((GROUPS, D_OUT, d_in), jnp.bfloat16)
    w = jax.eval_shape(FORMATS.get(name, lambda w: w), like)
    return dataclasses.replace(w, order=FRAGMENTS) if isinstance(w, CodedWeight) else w


def form(name: str, d_in: int = D_IN) -> few_rows.Form:
    """Return a format's form without numbers."""
    return few_rows.form_of((shaped(name, d_in),))


@pytest.mark.parametrize("name", FORMATS)
def test_few_rows_are_served(name):
    few_rows.check_support(form(name), 512, 128, [768], 2048, 128)
    few_rows.check_support(form(name), 64, 1, [4096], 2048, None)


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [
        ("fp8", (8192, 128, [768], 2048, 128), "up to 8 rows for each of 128 groups of float8"),
        ("fp8", (512, 128, [768], 2048, 16), "up to 8 rows for each of 16 groups of float8"),
        (
            "int4",
            (64, 1, [14336], 4096, None),
            "tiles of one group's matrices, up to 264 at a time",
        ),
        ("int4", (4, 8, [768], 2000, None), "d_in in steps of 64"),
        ("nf4", (9000, 9000, [768], 2048, None), "takes up to"),
    ],
)
def test_declines_what_it_cannot_serve(name, sizes, why):
    with pytest.raises(NotImplementedError, match=why):
        few_rows.check_support(form(name), *sizes)


def test_declines_forms_that_it_cannot_decode():
    assert form("bfloat16").coding == few_rows.PLAIN
    one, other = shaped("fp8"), shaped("int4")
    with pytest.raises(NotImplementedError, match="weights of one form"):
        few_rows.form_of((one, other))
    zeros = jax.ShapeDtypeStruct(other.scales.shape, jnp.uint8)
    with pytest.raises(NotImplementedError, match="zero points beside integers from 0 on"):
        few_rows.form_of((dataclasses.replace(other, zeros=zeros),))
    with pytest.raises(NotImplementedError, match="in the order of fragments, not rows"):
        few_rows.form_of((dataclasses.replace(other, order="rows"),))
    table = tuple(float(i * i) for i in range(16))
    with pytest.raises(NotImplementedError, match="float32 scales for any other table"):
        few_rows.form_of((dataclasses.replace(other, table=table),))
    with pytest.raises(NotImplementedError, match="scales of one row"):
        few_rows.form_of((dataclasses.replace(one, block=(128, 128)),))


PLAIN_SIZES = np.array([0, 3, 0, 9, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0], np.int32)


@pytest.mark.gpu
def test_plain_weights_of_few_rows_have_the_bits_of_mosaics():
    """One token's experts: most groups have no row, one more than a tile; two rows are in none."""
    sizes, bias = jnp.asarray(PLAIN_SIZES), rows(7, D_OUT)[:GROUPS]
    x, pair = rows(0)[:GROUPS], [weights("plain", seed) for seed in (1, 2)]
    addends = rows(4, D_OUT)[:GROUPS], rows(5, D_OUT)[:GROUPS]
    check(grouped_matmul, x, pair[0], sizes)
    check(grouped_matmul, x, pair[0], sizes, bias, addends[0].astype(jnp.float32))
    check(gated_matmul, x, *pair, sizes)
    check(gated_matmul, x, *pair, sizes, *addends)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [D_IN, 14336, 320])  # the last: half a stage is left
def test_plain_maps_of_few_rows_have_the_bits_of_mosaics(width):
    """Q, k and v of 5 of 8 rows, and one of them alone; a row alone has the same bits."""
    ws = [
        jax.random.normal(jax.random.key(n), (d_out, width), jnp.bfloat16) * width**-0.5
        for n, d_out in enumerate((4096, 1024, 1024))
    ]
    x, count, none = rows(3, width)[:8], jnp.int32(5), (None,) * 3
    given = x, ws, count, none
    for got, want in zip(
        joined_matmul(*given, implementation="cuda"),
        joined_matmul(*given, implementation="pallas_gpu"),
        strict=True,
    ):
        same_bits(got, want)
        assert not np.asarray(got[5:], np.float32).any()
    whole = matmul(x, ws[0], count, implementation="cuda")
    same_bits(whole, joined_matmul(*given, implementation="cuda")[0])
    alone = matmul(x[4:5], ws[0], jnp.int32(1), implementation="cuda")
    same_bits(alone[0], whole[4])


@pytest.mark.gpu
def test_more_plain_rows_are_mosaics():
    w, sizes = weights("plain", 1), jnp.asarray(SIZES)
    with pytest.raises(dispatch.Declined, match=r"up to 1 rows for each of 16 groups of plain"):
        grouped_matmul(rows(0), w, sizes, implementation="cuda")
    with pytest.raises(dispatch.Declined, match=r"dense rows takes 1 to 128 rows, not 129"):
        matmul(jnp.concatenate([rows(0)] * 2)[:129], w[0], jnp.int32(9), implementation="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["cuda", "pallas_gpu"])
def test_gated_maps_have_the_bits_of_three_launches_at_every_gate(implementation):
    """All 65,536 gates beside 8 or 256 ups: the products are the gates and ups themselves.

    XLA's division gives 4 in 1,000 of them other bits.
    """
    gates = np.arange(1 << 16, dtype=np.uint16).view(jnp.bfloat16.dtype)
    gates = np.where(np.isfinite(gates.astype(np.float32)), gates, np.zeros_like(gates))
    count, widths = (8, 16) if implementation == "cuda" else (256, 1)
    x = np.zeros((count, 64), gates.dtype)
    x[:, 0], x[:, 1] = 1, np.random.default_rng(0).normal(size=count).astype(gates.dtype)
    for part in np.split(gates, widths):
        w_gate, w_up = (np.zeros((len(part), 64), gates.dtype) for _ in range(2))
        w_gate[:, 0], w_up[:, 1] = part, 1
        arrays = [jnp.asarray(a) for a in (x, w_gate, w_up)]
        real = jnp.int32(count - 1)
        got = gated_maps(*arrays, real, implementation=implementation)
        joined = joined_matmul(arrays[0], arrays[1:], real, (None, None))
        same_bits(got, silu_times(*joined, real, implementation="cuda"))
        assert not np.asarray(got[-1], np.float32).any()
    same_bits(silu_of_experts(*joined, real), silu_times(*joined, real))
