"""The CUDA kernels' own code on a CPU: right numbers, whatever the order in which copies arrive.

Threads are fibers and PTX is C++ here (emulator/), so this shows indices, barriers and ranges;
time, registers and memory order only show on a GPU.
"""

import dataclasses
import itertools
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.cases.item_cases import check_items
from support.cases.likely_cases import LIKELY_CASES
from support.doubles.cuda_emulator import call, copied
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops import adapter_items
from lora_jax.ops.cases import (
    lora_case,
    merge_case,
)
from lora_jax.ops.keep_likely.reference import keep_likely
from lora_jax.ops.reroute import reference as reroute_reference

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
DRIVER = "layers.cc"
BF16 = ml_dtypes.bfloat16
# One program each: op by op they are fifty.
row_map = jax.jit(reroute_reference.row_map, static_argnums=2)
reroute = jax.jit(reroute_reference.reroute, static_argnums=4)
items_of = jax.jit(adapter_items.reference, static_argnums=1)


@pytest.mark.parametrize(
    ("d_out", "d_in", "ranks"),
    [(40, 64, (16, 0, 3)), (264, 128, (17, 32)), (72, 1088, (64, 33)), (136, 64, (128, 100))],
)
def test_merge_matches_float64(library, d_out, d_in, ranks):
    case = merge_case(len(ranks), d_out, d_in, ranks=ranks, dtype="bfloat16")
    w = copied(case.w)
    arrays = [copied(a) for a in case.arrays[1:]]
    library.emulate(3, 7)
    sizes = (len(ranks), d_out, d_in, case.max_rank, len(case.b_pool))
    out = np.full_like(w, np.nan)  # to be written throughout
    call(library.merge, out, w, *arrays, *sizes)
    apart = np.full_like(w, np.nan)
    call(library.merge_placed, apart, w, *arrays, np.array([*sizes, 1], np.int32))
    call(library.merge, w, w, *arrays, *sizes)
    np.testing.assert_array_equal(apart[::-1].view(np.int16), w.view(np.int16))
    np.testing.assert_array_equal(out.view(np.int16), w.view(np.int16))
    want = np.asarray(case.w, np.float64)
    a_pool, b_pool = (np.asarray(v, np.float64) for v in (case.a_pool, case.b_pool))
    for m, (a_row, b_row, rank) in enumerate(np.asarray(case.sites)):
        want[m] += float(case.scaling[m]) * b_pool[b_row:][:rank].T @ a_pool[a_row:][:rank]
    np.testing.assert_allclose(w.astype(np.float64), want, **TOLERANCE["bfloat16"])
    np.testing.assert_array_equal(w[case.sites[:, 2] == 0], copied(case.w)[case.sites[:, 2] == 0])


@pytest.mark.parametrize(
    "kinds", [("float32", "float32"), ("bfloat16",) * 2, ("bfloat16", "float32")]
)
@pytest.mark.parametrize(("d_out", "d_in", "experts"), [(530, 33, 0), (24, 96, 3)])
def test_lora_row_by_row_matches_float64(library, kinds, d_out, d_in, experts):
    dtype, y_dtype = kinds
    case = lora_case(9, d_out, d_in, ranks=(16, 0, 5), num_experts=experts, dtype=dtype)
    y, slots = copied(case.y).astype(np.float32 if y_dtype == "float32" else BF16), case.row_to_slot
    start, owners = y.astype(np.float64), case.row_to_expert
    owners = jnp.zeros(9, jnp.int32) if owners is None else owners
    arrays = [case.x, case.a_pool, case.b_pool, case.entries, case.scaling, slots, owners]
    arrays = [copied(a) for a in arrays]
    sizes = np.array(
        [9, d_in, d_out, 3, 16, 2 if y_dtype == dtype == "bfloat16" else dtype == "bfloat16"]
    )
    library.emulate(1, 3)
    call(library.lora_rows, *arrays, sizes.astype(np.int32), y)
    wide = [a.astype(np.float64) for a in arrays[:3]]
    want = lora_reference(start.copy(), *wide, *arrays[3:])
    np.testing.assert_allclose(y.astype(np.float64), want, **TOLERANCE[y_dtype])
    np.testing.assert_array_equal(y[arrays[5] == 1], start[arrays[5] == 1])


def lora_reference(y, x, a_pool, b_pool, entries, scaling, row_to_slot, row_to_expert):
    for t, (slot, expert) in enumerate(zip(row_to_slot, row_to_expert, strict=True)):
        a, b, rank, a_stride, b_stride = entries[slot] if slot >= 0 else np.zeros(5, np.int32)
        h = a_pool[a + expert * a_stride :][:rank] @ x[t]
        y[t] += scaling[slot] * h @ b_pool[b + expert * b_stride :][:rank]
    return y


FEW, *TILES = range(4)  # F32Form, with tiles of 16, 32 and 64 rows; -1 is the chosen one


def grouped_f32(library, x, w, sizes, bias=None, form=-1):
    y = np.full((len(x), w.shape[1]), np.nan, np.float32)
    shape = np.array((len(x), *w.shape, form, x.dtype == BF16), np.int32)
    call(library.grouped_f32, x, w, np.array(sizes, np.int32), bias, shape, y)
    return y


@pytest.mark.parametrize(
    ("sizes", "rows", "d_out", "d_in", "biased"),
    [
        ((5,), 7, 1, 132, False),
        ((0, 7, 1, 0, 20), 30, 19, 64, True),
        ((0,) * 40 + (3,), 3, 5, 4, True),
    ],
)
def test_grouped_f32_matches_float64(library, sizes, rows, d_out, d_in, biased):
    rng = np.random.default_rng(rows)
    x, w = rng.standard_normal((rows, d_in)), rng.standard_normal((len(sizes), d_out, d_in))
    bias = rng.standard_normal((len(sizes), d_out)) if biased else None
    given = [None if v is None else v.astype(np.float32) for v in (x, w, bias)]
    want = np.zeros((rows, d_out))
    library.emulate(1, 3)
    for g, (start, size) in enumerate(zip(np.cumsum(sizes) - sizes, sizes, strict=True)):
        want[start : start + size] = x[start : start + size] @ w[g].T + (bias[g] if biased else 0)
    y = grouped_f32(library, *given[:2], sizes, given[2])
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("d_out", "d_in"), [(6, 2048), (1, 1540), (5, 6180)])
def test_grouped_f32_adds_products_lanes_and_quarters_in_its_order(library, d_out, d_in):
    """Bits do not change with the kernel: models of several releases give the same tokens."""
    rng = np.random.default_rng(1)
    x, w = (rng.standard_normal((n, d_in)).astype(np.float32) for n in (5, d_out))
    quarter, lane = np.arange(4)[:, None], np.arange(32)
    quarters = np.zeros((5, d_out, 4), np.float32)
    for block in range(0, d_in, 2048):
        parts = np.zeros((5, d_out, 4, 32), np.float32)
        for step, i in itertools.product(range(4), range(4)):
            k = block + step * 512 + quarter * 128 + lane * 4 + i
            at = np.minimum(k, d_in - 1)
            a, b = (np.where(k < d_in, m[:, at], 0).astype("f8") for m in (x, w))
            parts = (a[:, None] * b + parts).astype(np.float32)
        for number in range(32):
            quarters = quarters + parts[..., number]
    want = quarters[..., 0]
    for number in (1, 2, 3):
        want = want + quarters[..., number]
    np.testing.assert_array_equal(grouped_f32(library, x, w[None], [5]), want)


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize(
    ("sizes", "rows", "d_out", "d_in"),
    [
        ((20, 0, 1, 13), 37, 70, 548),
        pytest.param((66,), 70, 66, 2308, marks=pytest.mark.long),
        pytest.param((3, 30), 35, 3, 4096, marks=pytest.mark.long),
    ],
)
def test_grouped_f32_has_the_same_bits_in_every_form(library, sizes, rows, d_out, d_in, dtype):
    """Few rows and tiles of many; x in bfloat16 gives the bits of its float32 values."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, d_in)).astype(dtype)
    w, bias = (rng.standard_normal((len(sizes), d_out, *n)).astype("f4") for n in ((d_in,), ()))
    library.emulate(1, 5)
    want = grouped_f32(library, x.astype(np.float32), w, sizes, bias, FEW)
    assert not np.isnan(want).any()
    assert not want[sum(sizes) :].any()
    for form in (-1, FEW, *TILES):
        np.testing.assert_array_equal(grouped_f32(library, x, w, sizes, bias, form), want)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(5, 2048), (9, 64), (2, 1032)])
def test_rms_norm_matches_float64(library, rows, size, added):
    rng = np.random.default_rng(size)
    x, addend = (rng.standard_normal((rows, size)).astype(BF16) for _ in range(2))
    weight, wide = rng.standard_normal(size).astype(BF16), x.astype(np.float32)
    total, y = np.full((2, rows, size), np.nan, BF16)
    given = (x, addend if added else None, weight, rows, size, 1e-5)
    call(library.rms_norm, *given, total if added else None, y)
    if added:
        wide = (wide + addend.astype(np.float32)).astype(BF16)
        np.testing.assert_array_equal(total, wide)
    wide = wide.astype(np.float64)
    want = wide / np.sqrt(np.mean(wide**2, axis=1, keepdims=True) + 1e-5) * weight.astype("f8")
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=4.1e-3)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(5, 1152), (9, 64), (2, 2048)])
def test_layer_norm_matches_float64(library, rows, size, biased):
    rng = np.random.default_rng(size)
    x = (3 + rng.standard_normal((rows, size))).astype(BF16)
    weight, bias = (rng.standard_normal(size).astype(BF16) for _ in range(2))
    y = np.full((rows, size), np.nan, BF16)
    call(library.layer_norm, x, weight, bias if biased else None, rows, size, 1e-6, y)
    centred = x.astype(np.float64) - x.astype(np.float64).mean(1, keepdims=True)
    normed = centred / np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + 1e-6)
    want = normed * weight.astype("f8") + (bias.astype("f8") if biased else 0)
    np.testing.assert_allclose(y.astype(np.float64), want, rtol=4.1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "softmax_first", "normed"),
    [(5, 128, 8, True, True), (3, 200, 6, True, False), (9, 8, 2, False, False)],
)
def test_experts_are_the_best_with_their_shares(library, tokens, experts, k, softmax_first, normed):
    logits = np.random.default_rng(k).standard_normal((tokens, experts)).astype(np.float32)
    logits[:, 3] = logits[:, 7]  # the lower id comes first
    weights, ids = np.full((tokens, k), np.nan, np.float32), np.full((tokens, k), -7, np.int32)
    sizes = np.array([tokens, experts, k, softmax_first, normed], np.int32)
    call(library.choose_experts, logits, sizes, 1.5, weights, ids)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(ids, order)
    shares = np.exp(logits.astype(np.float64))
    best = np.take_along_axis(shares, order, 1)
    best /= (shares if softmax_first else best).sum(1, keepdims=True)
    best /= best.sum(1, keepdims=True) if normed else 1
    np.testing.assert_allclose(weights, best * 1.5, rtol=1e-6)


@pytest.mark.parametrize(("rows", "real", "width"), [(9, 7, 8), (3, 0, 24), (300, 300, 1032)])
def test_silu_is_of_the_real_rows_alone(library, rows, real, width):
    rng = np.random.default_rng(0)
    gate, up = (6 * rng.standard_normal((2, rows, width))).astype(ml_dtypes.bfloat16)
    y = np.full((rows, width), np.nan, ml_dtypes.bfloat16)
    call(library.silu_times, gate, up, np.array([real], np.int32), y, rows, width)
    wide, other = gate.astype(np.float32), up.astype(np.float32)
    want = wide / (1 + np.exp(-wide)) * other
    got = y.astype(np.float32)
    np.testing.assert_allclose(got[:real], want[:real], **TOLERANCE["bfloat16"])
    assert not got[real:].any()


@pytest.mark.parametrize(
    ("rows", "real", "width"), [(9, 7, 4), (40, 40, 1028), (3, 0, 8), (5, 9, 36)]
)
def test_rows_are_taken_by_index_and_no_more_than_are_real(library, rows, real, width):
    rng = np.random.default_rng(0)
    x, order = rng.normal(size=(6, width)).astype(np.float32), rng.integers(0, 6, rows, np.int32)
    y = np.full((rows, width), np.nan, np.float32)
    call(library.take_rows, x, order, np.array([real], np.int32), y, rows, width // 4)
    np.testing.assert_array_equal(y[:real], x[order[:real]])
    assert np.isnan(y[real:]).all()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.long if p else ()) for p, n in enumerate(LIKELY_CASES)],
)
def test_likely_tokens_are_the_reference_ones(library, name):
    """The kernel's exponentials may differ from XLA's by a bit, which no share here hangs on."""
    logits, *params = (np.array(v) for v in LIKELY_CASES[name])
    least = np.full(len(logits), np.nan, np.float32)
    params[1] = params[1].astype(np.int32)
    call(library.keep_likely, logits, *params, *logits.shape, least)
    want = np.asarray(keep_likely(*LIKELY_CASES[name]))
    np.testing.assert_array_equal(np.where(logits < least[:, None], -np.inf, logits), want)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "q_heads", "kv_heads", "dim"),
    [(3, 6, 2, 64), (3, 3, 1, 128), (3, 2, 1, 256), (256, 3, 1, 128)],  # many: two heads a warp
)
def test_heads_are_normed_turned_and_placed(library, tokens, q_heads, kv_heads, dim, normed):
    rng, places = np.random.default_rng(dim), np.full(tokens, 99, np.int32)  # 99: nowhere
    places[:3] = 5, 99, 0
    sizes = [tokens, q_heads, kv_heads, dim]
    q, k, v = (
        rng.standard_normal((tokens, h, dim)).astype(BF16) for h in (q_heads, *sizes[2:3] * 2)
    )
    angles = rng.uniform(0, 9, (tokens, dim // 2))
    scales = rng.standard_normal((2, dim)).astype(BF16) if normed else [None, None]
    pages = np.full((2, 7, kv_heads, dim), 7, BF16)
    turned = np.full(q.shape, np.nan, BF16)
    turns = [f(angles).astype(np.float32) for f in (np.cos, np.sin)]
    given = (q, k, v, *turns, *scales, places, np.array(sizes, np.int32), 1e-6)
    call(library.place_heads, *given, 7, turned, *pages)

    def wanted(x, scale):
        wide = x.astype(np.float64)
        if scale is not None:
            wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
            wide = (wide * scale.astype(np.float64)).astype(BF16).astype(np.float64)
        a, b = np.split(wide, 2, axis=-1)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    close = {"rtol": 4.1e-3, "atol": 2e-2 if normed else 1e-6}
    np.testing.assert_allclose(turned.astype("f8"), wanted(q, scales[0]), **close)
    key = wanted(k, scales[1])
    for token, place in ((0, 5), (2, 0)):
        np.testing.assert_allclose(pages[0][place].astype("f8"), key[token], **close)
        np.testing.assert_array_equal(pages[1][place], v[token])
    others = np.delete(pages, [0, 5], axis=1)
    np.testing.assert_array_equal(others, np.full_like(others, 7))


@dataclasses.dataclass
class Sorting:
    """What the row map's kernel takes and gives; -7 where it has not written."""

    ids: np.ndarray
    owners: np.ndarray | None  # ESFT slots of tokens
    table: np.ndarray | None
    adapters: np.ndarray | None  # LoRA slots of tokens, -1: none
    num_tokens: int
    experts: int
    groups: int

    def run(self, library) -> dict[str, np.ndarray]:
        tokens, k = self.ids.shape
        rows = self.ids.size
        shapes = {"order": rows, "inverse": rows, "group_sizes": self.groups}
        shapes |= {"row_to_token": rows, "row_to_expert": rows, "items": (rows, 4), "num_items": 1}
        out = {name: np.full(shape, -7, np.int32) for name, shape in shapes.items()}
        order = None
        if self.adapters is not None:
            order = np.argsort(self.adapters.astype(np.uint32), kind="stable").astype(np.int32)
        slots = 0 if self.table is None else len(self.table)
        sizes = [self.num_tokens, tokens, k, slots, self.experts, self.groups, 8]
        given = (self.ids, self.owners, self.table, order, self.adapters, np.array(sizes, np.int32))
        call(library.reroute, *given, *out.values())
        return out


def sorting(tokens: int, k: int, experts: int, slots: int, lora_slots: int = 0) -> Sorting:
    rng = np.random.default_rng(tokens)
    groups = experts + slots * 13
    ids = rng.integers(-1, experts + 1, (tokens, k)).astype(np.int32)
    owners = rng.integers(-1, slots + 1, tokens).astype(np.int32)
    table = rng.integers(0, groups, (slots, experts)).astype(np.int32)
    adapters = rng.integers(-1, lora_slots, tokens).astype(np.int32) if lora_slots else None
    given = (ids, owners if slots else None, table if slots else None, adapters)
    return Sorting(*given, max(1, tokens - 3), experts, groups)


SORTED = ("order", "inverse", "group_sizes", "row_to_token", "row_to_expert")
SORTINGS = [
    (1, 1, 1, 0),
    (5, 2, 8, 0),
    (300, 8, 128, 0),
    (9, 4, 16, 3),
    (40, 3, 16, 1259),
    (700, 6, 64, 40),
]


@pytest.mark.parametrize(("tokens", "k", "experts", "slots"), SORTINGS)
def test_reroute_is_the_references(library, tokens, k, experts, slots):
    case = sorting(tokens, k, experts, slots)
    library.emulate(1, tokens)
    got = case.run(library)
    ids, live = jnp.asarray(case.ids), jnp.int32(case.num_tokens)
    if slots:
        table = (jnp.asarray(case.owners), jnp.asarray(case.table))
        want = reroute(ids, *table, live, case.groups)
    else:
        want = row_map(ids, live, case.groups)
    for name in SORTED:
        np.testing.assert_array_equal(got[name], getattr(want, name), err_msg=name)
    assert got["num_items"] == -7


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "slots", "lora_slots"),
    [
        (1, 1, 1, 0, 1),
        (9, 4, 16, 3, 5),
        (9, 4, 16, 90, 5),
        (16, 8, 4, 0, 2),
        (40, 8, 8, 0, 2),
        (700, 6, 16, 2, 4),
    ],
)
def test_row_map_cuts_items_of_adapters(library, tokens, k, experts, slots, lora_slots):
    case = sorting(tokens, k, experts, slots, lora_slots)
    library.emulate(1, tokens)
    got = case.run(library)
    ids, live = jnp.asarray(case.ids), jnp.int32(case.num_tokens)
    adapters = items_of(jnp.asarray(case.adapters), lora_slots)
    table = np.arange(experts)[None] if case.table is None else case.table
    owners = np.full(tokens, -1) if case.owners is None else case.owners
    given = (jnp.asarray(owners.astype(np.int32)), jnp.asarray(table.astype(np.int32)))
    want = reroute(ids, *given, live, case.groups, adapters)
    for name in SORTED:
        np.testing.assert_array_equal(got[name], getattr(want, name), err_msg=name)
    check_items(got["items"][: got["num_items"][0]], want, most=8)
