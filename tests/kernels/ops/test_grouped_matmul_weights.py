"""Quantised weights: the bits of the plain array that they stand for, in every implementation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.oracles.tolerance import TOLERANCE

from lora_jax.models.quantised.forms import SIGNED
from lora_jax.ops.cases import grouped_case
from lora_jax.ops.grouped_matmul import (
    CodedWeight,
    ScaledWeight,
    gated_matmul,
    grouped_matmul,
    joined_matmul,
    matmul,
)
from lora_jax.ops.grouped_matmul.orders import for_kernels
from lora_jax.ops.grouped_matmul.weights import ROWS, unpacked

IMPLEMENTATIONS = ["ffi", "xla", "reference"]
TABLE = tuple(float(v) for v in np.linspace(-1, 0.9, 16, dtype=np.float32) ** 3)  # 16 magnitudes
INTEGERS = tuple(float(v) for v in range(16))


def bits(a) -> np.ndarray:
    """Return float32 values, which show every bit of a bfloat16."""
    return np.asarray(a, np.float32)


def coded(
    groups: int,
    d_out: int,
    d_in: int,
    *,
    group: int,
    dtype: str,
    zeros: bool = False,
    scales: str = "float32",
    table: tuple[float, ...] = TABLE,
) -> tuple[CodedWeight, np.ndarray]:
    """Return a random coded weight and, computed by numpy, the array that it stands for."""
    rng = np.random.default_rng(d_in + group)
    codes = rng.integers(0, 16, (groups, d_out, d_in), np.uint8)
    scale = (rng.random((groups, d_out, d_in // group)) / d_in**0.5).astype(jnp.dtype(scales))
    zero = rng.integers(0, 17, scale.shape).astype(np.uint8) if zeros else None
    table = INTEGERS if zeros else table
    values = np.array(table, np.float32)[codes].reshape(*scale.shape, group)
    if zero is not None:
        values = values - zero[..., None].astype(np.float32)
    values = (values * scale[..., None].astype(np.float32)).reshape(codes.shape)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    parts = [None if a is None else jnp.asarray(a) for a in (packed, scale, zero)]
    return CodedWeight(*parts, table, jnp.dtype(dtype)), values.astype(jnp.dtype(dtype))


def scaled(
    groups: int, d_out: int, d_in: int, *, block: tuple[int, int], dtype: str
) -> tuple[ScaledWeight, np.ndarray]:
    """Return a random scaled weight of every e4m3 value, and the array that it stands for."""
    rng = np.random.default_rng(d_in + block[0])
    codes = rng.integers(0, 127, (groups, d_out, d_in), np.uint8)  # 127 is NaN
    codes |= rng.integers(0, 2, codes.shape, np.uint8) << 7
    values = codes.view(ml_dtypes.float8_e4m3fn)
    shape = (groups, -(-d_out // block[0]), -(-d_in // block[1]))
    scales = (rng.random(shape, np.float32) + 0.1) / 448 / d_in**0.5
    wide = scales.repeat(block[0], 1)[:, :d_out].repeat(block[1], 2)[:, :, :d_in]
    plain = (values.astype(np.float32) * wide).astype(jnp.dtype(dtype))
    weight = ScaledWeight(jnp.asarray(values), jnp.asarray(scales), block, jnp.dtype(dtype))
    return weight, plain


@functools.partial(jax.jit, static_argnames="implementation")
def run(x, w, group_sizes, bias=None, *, implementation="ffi"):
    return grouped_matmul(x, w, group_sizes, bias, implementation=implementation)


# groups, d_out, d_in, weights of a group: tails of columns, blocks of K, groups that cross blocks.
CODED = [(3, 21, 3200, 128), (4, 43, 96, 32), (1, 8, 4096, 1024)]
SCALED = [
    (2, 130, 3088, (128, 128)),
    (1, 8, 16, (1, 16)),
    (4, 43, 400, (43, 400)),
    (2, 43, 960, (6, 64)),
]
KINDS = [("table", "float32"), ("table", "bfloat16"), ("zeros", "bfloat16"), ("narrow", "bfloat16")]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("sizes", CODED, ids=str)
def test_coded_weights_have_the_bits_of_the_plain_ones(sizes, kind, implementation):
    groups, d_out, d_in, group = sizes
    scales = "bfloat16" if kind[0] == "narrow" else "float32"
    table = SIGNED if kind[0] == "narrow" else TABLE
    more = {"zeros": kind[0] == "zeros", "scales": scales, "table": table}
    w, plain = coded(groups, d_out, d_in, group=group, dtype=kind[1], **more)
    np.testing.assert_array_equal(bits(jax.jit(CodedWeight.plain)(w)), bits(plain))
    check_products(w, plain, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("sizes", SCALED, ids=str)
def test_scaled_weights_have_the_bits_of_the_plain_ones(sizes, kind, implementation):
    *shape, block = sizes
    w, plain = scaled(*shape, block=block, dtype=kind)
    np.testing.assert_array_equal(bits(jax.jit(ScaledWeight.plain)(w)), bits(plain))
    check_products(w, plain, implementation)


def check_products(w, plain: np.ndarray, implementation: str) -> None:
    """Compare products of few rows and of many with those of the plain array."""
    groups, d_out, d_in = plain.shape
    for rows in (3, 61):
        sizes = (groups, d_out, d_in)
        case = grouped_case(rows, *sizes, dtype=plain.dtype.name, bias=rows == 3, padding=2)
        arrays = (case.group_sizes, case.bias)
        want = run(case.x, jnp.asarray(plain), *arrays, implementation=implementation)
        got = run(case.x, w, *arrays, implementation=implementation)
        np.testing.assert_array_equal(bits(got), bits(want), err_msg=f"{rows} rows")
        assert bits(got)[:rows].any()
        ordered = run(case.x, for_kernels(w), *arrays, implementation=implementation)
        np.testing.assert_array_equal(bits(ordered), bits(want), err_msg=f"{rows} rows, in lanes")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_alone_and_in_a_batch(dtype):
    for w, _ in (
        coded(1, 43, 2560, group=64, dtype=dtype),
        scaled(1, 43, 2560, block=(128, 128), dtype=dtype),
    ):
        x = grouped_case(100, 1, 1, 2560, dtype=dtype).x
        want = bits(run(x, w, jnp.array([100], jnp.int32)))
        for first, rows in ((0, 1), (7, 2), (10, 3), (20, 4), (30, 5), (40, 50), (99, 1)):
            part = run(x[first : first + rows], w, jnp.array([rows], jnp.int32))
            np.testing.assert_array_equal(bits(part), want[first : first + rows])


@pytest.mark.parametrize("group", [32, 64, 128, 320])
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_codes_in_the_order_of_kernels_have_the_bits_of_the_plain_ones(kind, group):
    """For each number of rows that a kernel takes at once, and columns of parts of its tiles."""
    more = {"zeros": kind[0] == "zeros", "scales": "bfloat16" if kind[0] == "narrow" else "float32"}
    sizes = jnp.array([*range(1, 10), 35], jnp.int32)
    for d_out in (5, 43):
        w, plain = coded(len(sizes), d_out, 640, group=group, dtype=kind[1], **more)
        x = grouped_case(80, 1, 1, 640, dtype=kind[1]).x
        want = run(x, jnp.asarray(plain), sizes)
        np.testing.assert_array_equal(bits(run(x, for_kernels(w), sizes)), bits(want))


def test_scales_of_any_size_have_the_bits_of_the_plain_weights():
    # Products beyond the normal bfloat16 numbers cannot be looked up by their exponents.
    w, _ = scaled(1, 16, 64, block=(1, 32), dtype="bfloat16")
    sizes = [0, -1, -(2.0**-116), 2.0**-101, 2.0**-99, 2.0**99, 2.0**118]
    scales = np.resize(np.array(sizes, np.float32), w.scales.shape)
    w = dataclasses.replace(w, scales=jnp.asarray(scales))
    values = np.asarray(w.values).astype(np.float32)
    check_each_weight(w, values * scales.repeat(32, 2))


@pytest.mark.parametrize("table", [SIGNED, TABLE], ids=["signed", "table"])
def test_coded_scales_of_any_size_have_the_bits_of_the_plain_weights(table):
    """Codes of few magnitudes are scaled by halves where the scale is positive."""
    w, _ = coded(1, 16, 64, group=32, dtype="bfloat16", table=table)
    sizes = [0, -1, -(2.0**-116), 2.0**-101, 2.0**-99, 1.3, 2.0**118]
    scales = np.resize(np.array(sizes, np.float32), w.scales.shape)
    values = np.array(table, np.float32)[unpacked(w.codes, ROWS)]
    w = for_kernels(dataclasses.replace(w, scales=jnp.asarray(scales)))
    check_each_weight(w, values * scales.repeat(32, 2))


def check_each_weight(w, values: np.ndarray) -> None:
    """Compare the weights that products of a 64 x 64 identity show with these, rounded."""
    plain = jnp.asarray(values.astype(jnp.bfloat16))
    x = jnp.eye(64, dtype=jnp.bfloat16)  # each row of x is one weight of all columns
    for rows in (3, 64):
        got, want = (run(x[:rows], part, jnp.array([rows], jnp.int32)) for part in (w, plain))
        np.testing.assert_array_equal(bits(got), bits(want), err_msg=f"{rows} rows")
    alone = [run(row[None], w, jnp.array([1], jnp.int32)) for row in x]  # each by a kernel for one
    np.testing.assert_array_equal(bits(jnp.concatenate(alone)), bits(want), err_msg="one row")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gate_and_up_and_one_matrix(implementation):
    """One of two may be plain; a single matrix [d_out, d_in] has no groups."""
    gate, plain_gate = coded(3, 24, 64, group=32, dtype="bfloat16")
    up, plain_up = scaled(3, 24, 64, block=(1, 64), dtype="bfloat16")
    case = grouped_case(20, 3, 24, 64, dtype="bfloat16")
    fuse = jax.jit(functools.partial(gated_matmul, implementation=implementation))
    want = fuse(case.x, jnp.asarray(plain_gate), jnp.asarray(plain_up), case.group_sizes)
    np.testing.assert_array_equal(bits(fuse(case.x, gate, up, case.group_sizes)), bits(want))
    one = jax.jit(functools.partial(matmul, implementation=implementation))
    got = one(case.x, gate[1], jnp.int32(20))
    np.testing.assert_array_equal(
        bits(got), bits(one(case.x, jnp.asarray(plain_gate[1]), jnp.int32(20)))
    )


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_maps_of_several_forms_in_one_call_have_the_bits_of_calls_of_their_own(rows):
    d_in, rng = 256, np.random.default_rng(rows)
    plain = jnp.asarray(rng.standard_normal((9, d_in)) / 16, jnp.bfloat16)
    forms = {
        "coded": coded(1, 33, d_in, group=64, dtype="bfloat16")[0],
        "zeros": coded(1, 8, d_in, group=32, dtype="bfloat16", zeros=True)[0],
        "scaled": scaled(1, 21, d_in, block=(8, 64), dtype="bfloat16")[0],
    }
    weights = [plain, *(for_kernels(w)[0] for w in forms.values()), plain * 2]
    biases = [None, jnp.ones(33, jnp.bfloat16), None, jnp.ones(21, jnp.bfloat16), None]
    x, count = jnp.asarray(rng.standard_normal((rows + 2, d_in)), jnp.bfloat16), jnp.int32(rows)
    ys = joined_matmul(x, weights, count, biases, implementation="ffi")
    for y, w, bias in zip(ys, weights, biases, strict=True):
        want = matmul(x, w, count, bias, implementation="ffi")
        np.testing.assert_array_equal(bits(y), bits(want))
        assert np.all(bits(y)[rows:] == 0)
        assert np.any(bits(y)[:rows] != 0)


def test_groups_that_the_kernel_does_not_take_run_as_plain_jax():
    w, plain = coded(1, 5, 48, group=16, dtype="float32")
    case = grouped_case(4, 1, 5, 48)
    with pytest.raises(NotImplementedError, match="groups in multiples of 32 weights, not 16"):
        grouped_matmul(case.x, w, case.group_sizes, implementation="ffi")
    got = grouped_matmul(case.x, w, case.group_sizes)
    want = np.asarray(case.x) @ plain[0].T
    np.testing.assert_allclose(np.asarray(got), want, **TOLERANCE["float32"])
    w, _ = scaled(1, 5, 40, block=(1, 40), dtype="float32")
    x = grouped_case(4, 1, 5, 40).x
    with pytest.raises(NotImplementedError, match="in multiples of 16, not 40 and 40"):
        grouped_matmul(x, w, case.group_sizes, implementation="ffi")


def test_kernels_for_plain_weights_decline():
    for name, dtype in (("cuda", "float32"), ("pallas_tpu", "bfloat16")):
        w, _ = coded(1, 8, 64, group=32, dtype=dtype)
        case = grouped_case(4, 1, 8, 64, dtype=dtype)
        with pytest.raises(NotImplementedError, match="takes plain weights, not CodedWeight"):
            grouped_matmul(case.x, w, case.group_sizes, implementation=name)


def test_rounding_and_order_of_plain_weights_are_not_left_to_the_compiler():
    """On a CPU it leaves both as they are; on others it may drop the one and fuse the other."""
    w, _ = coded(1, 8, 64, group=32, dtype="bfloat16")
    traced = str(jax.make_jaxpr(CodedWeight.plain)(w))
    assert "reduce_precision[exponent_bits=8 mantissa_bits=7]" in traced
    x, sizes = jnp.ones((2, 64), jnp.bfloat16), jnp.array([2], jnp.int32)
    traced = str(jax.make_jaxpr(functools.partial(run, implementation="xla"))(x, w, sizes))
    assert "optimization_barrier" in traced


@pytest.mark.usefixtures("shapes_unchecked")
def test_parts_that_do_not_fit_are_named():
    w, _ = coded(1, 8, 64, group=32, dtype="float32")
    case = grouped_case(4, 1, 8, 64)

    def error(w, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            grouped_matmul(case.x, w, case.group_sizes)

    change = functools.partial(dataclasses.replace, w)
    error(
        change(scales=w.scales[:, :7]), r"w: scales \(1, 7, 2\) do not fit codes, want \(1, 8, 2\)"
    )
    error(change(zeros=w.codes), r"zeros \(1, 8, 32\) do not fit")
    error(change(scales=jnp.ones((1, 8, 3))), "3 groups do not divide d_in 64")
    error(change(scales=jnp.ones((1, 8, 0))), "0 groups do not divide d_in 64")
    error(change(scales=jnp.ones((1, 8, 64))), "64 groups do not divide d_in 64")
    error(change(table=(1.0,) * 8), "want 16 table values.* got 8")
    error(change(codes=w.codes.astype(jnp.int32)), "int32")
    error(change(dtype=jnp.dtype(jnp.bfloat16)), "x float32, w bfloat16")
    s, _ = scaled(1, 8, 64, block=(8, 64), dtype="float32")
    error(dataclasses.replace(s, block=(4, 64)), r"scales \(1, 1, 1\) .*want \(1, 2, 1\)")
    error(dataclasses.replace(s, values=s.values.astype(jnp.float32)), "want float8_e4m3fn")
