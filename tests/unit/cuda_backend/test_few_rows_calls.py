"""Calls of products of few rows: forms of weights, parts of both of them, what is declined."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.checks.handlers import assert_served
from support.drivers.lowering import CustomCall, custom_calls

from cuda_backend import few_rows, grouped_matmul
from lora_jax.models.quantised.forms import (
    E2M1,
    FP4,
    NF4,
    SIGNED,
    UNSIGNED,
    CodedForm,
    ScaledForm,
)
from lora_jax.ops import hopper
from lora_jax.ops.grouped_matmul._gpu_tiles import QUANTISED_COLUMNS
from lora_jax.ops.grouped_matmul.weights import FRAGMENTS, ROWS, CodedWeight, ScaledWeight

GROUPS, D_OUT, D_IN = 8, 128, 256
FROM_7 = tuple(float(i - 7) for i in range(16))
UNEVEN = tuple(float(i * i) for i in range(16))
BF16, F32 = jnp.bfloat16, jnp.float32


def array(*shape: int, dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def coded(table, group: int, scales=BF16, zeros=False, order=FRAGMENTS, lead=GROUPS) -> CodedWeight:
    codes = array(lead, D_OUT, D_IN // 2, dtype=jnp.uint8)
    by_group = array(lead, D_OUT, D_IN // group, dtype=scales)
    points = array(lead, D_OUT, D_IN // group, dtype=jnp.uint8)
    return CodedWeight(codes, by_group, points if zeros else None, table, BF16, order)


def scaled(rows: int = 1, columns: int = 128) -> ScaledWeight:
    values = array(GROUPS, D_OUT, D_IN, dtype=jnp.float8_e4m3fn)
    return ScaledWeight(
        values, array(GROUPS, D_OUT // rows, D_IN // columns, dtype=F32), (rows, columns), BF16
    )


NONE = "0xbf16"
PARTS = ((2, 5), (5, 8), (8, 11), (11, 14), (14, 16))  # of the operands


@dataclasses.dataclass(frozen=True)
class Given:
    """Operands of a call behind x and the sizes, by what they are."""

    call: CustomCall
    stored: tuple[str, ...]
    scales: tuple[str, ...]
    zeros: tuple[str, ...]
    biases: tuple[str, ...]
    addends: tuple[str, ...]


def only_call(op, *args, widths=(D_OUT,)) -> Given:
    """Return the one call; its handler takes it, and it has a result of each width."""
    (call,) = custom_calls(op, *args)
    assert_served(call)
    assert call.target == "lora_jax_cuda_few_rows"
    results = tuple(f"20x{width}xbf16" for width in widths) + (NONE,) * (3 - len(widths))
    assert (call.results, call.aliases) == (results, {})
    parts = (call.operands[first:end] for first, end in PARTS)
    return Given(call, *parts)


X, SIZES = array(20, D_IN), array(GROUPS, dtype=jnp.int32)
CODES = "8x128x128xui8"  # two of 4 bits in a byte
# A weight; its values and its scales as they are stored; its coding, columns of a scale, first
# value.
FORMS = {
    "float8": (scaled(), "8x128x256xf8E4M3FN", "8x128x2xf32", few_rows.FLOAT8, 128, 0),
    "float8 of whole rows": (
        *(scaled(1, D_IN), "8x128x256xf8E4M3FN", "8x128x1xf32"),
        *(few_rows.FLOAT8, D_IN, 0),
    ),
    "integers": (coded(SIGNED, 128), CODES, "8x128x2xbf16", few_rows.INTEGER, 128, -8),
    "e2m1": (coded(E2M1, 32), CODES, "8x128x8xbf16", few_rows.E2M1, 32, 0),
    "table": (coded(UNEVEN, 64, F32), CODES, "8x128x4xf32", few_rows.TABLE, 64, 0),
    "table of whole rows": (
        *(coded(UNEVEN, D_IN, F32), CODES, "8x128x1xf32"),
        *(few_rows.TABLE, D_IN, 0),
    ),
    "gptq": (coded(SIGNED, 128, F32), CODES, "8x128x2xf32", few_rows.AFFINE, 128, -8),
    "awq": (coded(UNSIGNED, 128, F32, zeros=True), CODES, "8x128x2xf32", few_rows.AFFINE, 128, 0),
    "zeros": (coded(UNSIGNED, 128, zeros=True), CODES, "8x128x2xbf16", few_rows.AFFINE, 128, 0),
    "integers of 32": (coded(SIGNED, 32), CODES, "8x128x8xbf16", few_rows.AFFINE, 32, -8),
    "an odd scale": (coded(SIGNED, D_IN), CODES, "8x128x1xbf16", few_rows.AFFINE, D_IN, -8),
    "from -7": (coded(FROM_7, 128), CODES, "8x128x2xbf16", few_rows.AFFINE, 128, -7),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_weight_is_streamed_as_it_is_stored(on_hopper, name):
    w, stored, scales, coding, columns, first = FORMS[name]
    given = only_call(lambda *args: grouped_matmul.grouped_matmul(*args, None), X, w, SIZES)
    assert given.stored == (stored, NONE, NONE)
    assert given.scales == (scales, NONE, NONE)
    zeros = getattr(w, "zeros", None)
    assert given.zeros == ("8x128x2xui8" if zeros is not None else NONE, NONE, NONE)
    assert (given.biases, given.addends) == ((NONE,) * 3, (NONE,) * 2)
    table = given.call.attributes.pop("table")
    said = {"coding": coding, "scale_columns": columns, "first": first, "gated": False}
    assert given.call.attributes == said
    assert tuple(table) == (w.table if coding == few_rows.TABLE else (0.0,) * 16)


def test_gate_and_up_are_one_call_with_both_addends(on_hopper):
    w, addend = coded(SIGNED, 128), array(20, D_OUT, dtype=F32)
    given = only_call(grouped_matmul.gated_matmul, X, w, w, SIZES, addend, addend)
    assert given.stored == (*[f"{GROUPS}x{D_OUT}x{D_IN // 2}xui8"] * 2, NONE)
    assert given.scales == (*[f"{GROUPS}x{D_OUT}x2xbf16"] * 2, NONE)
    assert given.addends == (f"20x{D_OUT}xf32",) * 2
    assert given.call.attributes["gated"]


def test_one_product_has_a_bias_and_an_addend(on_hopper):
    bias, addend = array(GROUPS, D_OUT), array(20, D_OUT)
    given = only_call(grouped_matmul.grouped_matmul, X, scaled(), SIZES, bias, addend)
    assert given.biases == (f"{GROUPS}x{D_OUT}xbf16", NONE, NONE)
    assert given.addends == (f"20x{D_OUT}xbf16", NONE)


def test_maps_side_by_side_are_one_call_of_one_group(on_hopper):
    """q, k and v, of which one has no bias."""

    def joined(x, w, bias, num_rows):
        biases = bias, None, bias
        return grouped_matmul.joined_matmul(x, (w[0], w[1], w[2]), num_rows, biases)

    w, bias = coded(SIGNED, 128), array(D_OUT)
    given = only_call(joined, X, w, bias, array(dtype=jnp.int32), widths=(D_OUT,) * 3)
    assert given.stored == (f"1x{D_OUT}x{D_IN // 2}xui8",) * 3
    assert given.biases == (f"1x{D_OUT}xbf16", NONE, f"1x{D_OUT}xbf16")
    assert not given.call.attributes["gated"]
    with pytest.raises(NotImplementedError, match="up to 3 maps, not 4"):
        few_rows.products(X, (w,) * 4, (None,) * 4, (None,) * 4, SIZES, None)
    with pytest.raises(NotImplementedError, match="joined_matmul takes bfloat16, not float32"):
        grouped_matmul.joined_matmul(array(20, D_IN, dtype=F32), (w,), SIZES, (None,))


@pytest.mark.parametrize(
    ("weights", "why"),
    [
        (
            (scaled(), coded(SIGNED, 128)),
            "weights of one form, not float8 by 128 weights, integers by 128",
        ),
        ((scaled(2),), r"scales of one row, not of \(2, 128\)"),
        ((array(GROUPS, D_OUT, D_IN, dtype=F32),), "plain weights in bfloat16, not float32"),
        ((coded(SIGNED, 128, zeros=True),), "zero points beside integers from 0 on"),
        (
            (coded(UNSIGNED, 128, F32), coded(UNSIGNED, 128, F32, zeros=True)),
            "weights of one form, not affine integers by 128 weights, affine integers by 128",
        ),
        ((coded(SIGNED, 128, order=ROWS),), "not rows"),
        ((coded(UNEVEN, 64),), "float32 scales for any other table"),
    ],
    ids=["two forms", "blocks", "plain", "zeros", "one zeros", "order", "table"],
)
def test_declines_weights_of_another_form(weights, why):
    with pytest.raises(NotImplementedError, match=why):
        few_rows.form_of(weights)


INTEGERS = [
    CodedForm(UNSIGNED if zeros else SIGNED, group, np.dtype(dtype), zeros)
    for zeros in (False, True)
    for group in (32, 64, 128, 768)  # the last: all of a row
    for dtype in (np.float32, BF16)
]
TABLES = [CodedForm(table, group) for table in (NF4, FP4) for group in (64, 128, 256)]
LOADED = (*INTEGERS, *TABLES, CodedForm(E2M1, 32, np.dtype(BF16)), ScaledForm(128), ScaledForm(768))


@pytest.mark.parametrize("form", LOADED, ids=str)
def test_what_loaders_make_is_served(form):
    """Experts of up to 64 tokens, and maps of one row to 64."""
    shape = (128, 2048, 768)
    parts = {n: array(*size, dtype=dtype) for n, (size, dtype) in form.parts(shape).items()}
    w = form.weight(parts, shape, BF16)
    w = dataclasses.replace(w, order=FRAGMENTS) if isinstance(w, CodedWeight) else w
    made = few_rows.form_of((w, w))
    for rows in (8, 64, 512):
        few_rows.check_support(made, rows, 128, [2048], 768, None)
    for rows in (1, 8, 64):
        few_rows.check_support(made, rows, 1, [2048], 768, None)


PLAIN = {"coding": few_rows.PLAIN}


@pytest.mark.parametrize(
    ("sizes", "form", "why"),
    [
        ((65, 8, 96, 256), {}, "up to 8 rows for each of 8 groups of float8 weights, not 65"),
        ((20, 8, 96, 256), {"likely": 2}, "each of 2 groups of float8 weights, not 20"),
        ((9, 8, 96, 256), PLAIN, "up to 1 rows for each of 8 groups of plain weights, not 9"),
        ((9, 1, 96, 256), PLAIN, "up to 8 rows for each of 1 groups of plain weights, not 9"),
        ((8, 1, 96, 256), PLAIN, "d_out of plain weights above 64 in steps of 64, as .* not 96"),
        ((8, 1, 8256, 256), PLAIN, "up to 128 at a time, not 129 of 8 rows by 8256"),
        ((64, 257, 96, 256), PLAIN, "up to 256 groups of plain weights, not 257"),
        ((6400, 1, 96, 256), {}, "tiles of one group's matrices, up to 264 at a time, not"),
        ((9000, 2000, 96, 256), {}, "up to 1024 blocks of 8 rows, not 9000 rows in 2000 groups"),
        ((20, 8, 96, 256), {}, "d_out of quantised weights in steps of 64, as .* not 96"),
        ((20, 8, 32, 256), {}, "d_out of quantised weights in steps of 64, as .* not 32"),
        ((20, 8, 96, 96), {}, "d_in in steps of 64 and d_out in steps of 8, not 96 and 96"),
        ((20, 8, 128, 256), {"columns": 96}, "groups of 128 weights or multiples, not 96"),
        (
            (20, 8, 128, 192),
            {"coding": few_rows.AFFINE, "columns": 96},
            "groups of 64 or 32 weights or multiples, not 96",
        ),
        (
            (20, 8, 128, 1 << 18),
            {"coding": few_rows.AFFINE, "columns": 1 << 17},
            "no rows of 262144 in groups of 131072",
        ),
        (
            (20, 8, 128, 1 << 17),
            {"coding": few_rows.AFFINE, "columns": 32},
            "no rows of 131072 in groups of 32",
        ),
    ],
    ids=[
        *("rows", "likely", "plain groups", "plain dense", "plain width", "plain tiles"),
        "plain list",
        *("dense", "blocks", "quantised", "narrow", "width", "scales", "affine", "long", "many"),
    ],
)
def test_declines_sizes_that_the_kernel_is_not_for(sizes, form, why):
    rows, groups, d_out, d_in = sizes
    made = few_rows.Form(form.get("coding", few_rows.FLOAT8), form.get("columns", 128))
    with pytest.raises(NotImplementedError, match=why):
        few_rows.check_support(made, rows, groups, [d_out], d_in, form.get("likely"))


def test_few_rows_are_served_where_mosaics_kernel_serves_many():
    """One width goes one way: XLA, which would have the other rows, sums in another order."""
    assert few_rows.STEP_COLUMNS == hopper.COLUMNS == QUANTISED_COLUMNS
    for width in (8, 64, 128):
        few_rows.check_support(few_rows.Form(few_rows.PLAIN, 256), 8, 1, [width], 256, None)
    for width in (64, 128):
        few_rows.check_support(few_rows.Form(few_rows.FLOAT8, 128), 8, 1, [width], 256, None)


def test_declines_one_addend_of_two(on_hopper):
    w, addend = coded(SIGNED, 128), array(20, D_OUT)
    with pytest.raises(NotImplementedError, match="both addends or none"):
        custom_calls(grouped_matmul.gated_matmul, X, w, w, SIZES, addend)


def test_products_in_float32_take_plain_weights(on_hopper):
    wide = dataclasses.replace(coded(SIGNED, 128), dtype=F32)
    with pytest.raises(NotImplementedError, match="plain weights, not CodedWeight"):
        grouped_matmul.in_float32(array(20, D_IN, dtype=F32), wide, SIZES, None)
