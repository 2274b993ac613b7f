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
from cuda_emulator import call, compile_library
from item_cases import check_items
from tolerance import TOLERANCE

from cuda_backend import paged_attention
from lora_jax.ops import adapter_items
from lora_jax.ops.cases import (
    AttentionCase,
    ModelShape,
    attention_case,
    lora_case,
    merge_case,
)
from lora_jax.ops.paged_attention import reference as attention_reference
from lora_jax.ops.reroute import reference as reroute_reference

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_library(tmp_path_factory.mktemp("emulated"))


def copied(array, dtype=None) -> np.ndarray:
    return np.array(array, dtype, copy=True, order="C")


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
    call(library.merge, w, *arrays, *sizes)
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
    y, want = np.full((rows, d_out), np.nan, np.float32), np.zeros((rows, d_out))
    library.emulate(1, 3)
    counts = np.array(sizes, np.int32)
    call(library.grouped_f32, *given[:2], counts, given[2], rows, len(sizes), d_out, d_in, y)
    for g, (start, size) in enumerate(zip(np.cumsum(counts) - counts, sizes, strict=True)):
        want[start : start + size] = x[start : start + size] @ w[g].T + (bias[g] if biased else 0)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(6, 2, 64), (3, 1, 128), (2, 1, 256)])
def test_heads_are_normed_turned_and_placed(library, q_heads, kv_heads, dim, normed):
    rng, places = np.random.default_rng(dim), np.array([5, 99, 0], np.int32)  # 99: nowhere
    q, k, v = (rng.standard_normal((3, h, dim)).astype(BF16) for h in (q_heads, *[kv_heads] * 2))
    angles = rng.uniform(0, 9, (3, dim // 2))
    scales = rng.standard_normal((2, dim)).astype(BF16) if normed else [None, None]
    pages = np.full((2, 7, kv_heads, dim), 7, BF16)
    turned, sizes = np.full(q.shape, np.nan, BF16), [3, q_heads, kv_heads, dim]
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
        want = reroute_reference.reroute(ids, *table, live, case.groups)
    else:
        want = reroute_reference.row_map(ids, live, case.groups)
    for name in SORTED:
        np.testing.assert_array_equal(got[name], getattr(want, name), err_msg=name)
    assert got["num_items"] == -7


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "slots", "lora_slots"),
    [(1, 1, 1, 0, 1), (9, 4, 16, 3, 5), (40, 8, 8, 0, 2), (700, 6, 16, 2, 4)],
)
def test_row_map_cuts_items_of_adapters(library, tokens, k, experts, slots, lora_slots):
    case = sorting(tokens, k, experts, slots, lora_slots)
    library.emulate(1, tokens)
    got = case.run(library)
    ids, live = jnp.asarray(case.ids), jnp.int32(case.num_tokens)
    adapters = adapter_items.reference(jnp.asarray(case.adapters), lora_slots)
    table = np.arange(experts)[None] if case.table is None else case.table
    owners = np.full(tokens, -1) if case.owners is None else case.owners
    given = (jnp.asarray(owners.astype(np.int32)), jnp.asarray(table.astype(np.int32)))
    want = reroute_reference.reroute(ids, *given, live, case.groups, adapters)
    for name in SORTED:
        np.testing.assert_array_equal(got[name], getattr(want, name), err_msg=name)
    check_items(got["items"][: got["num_items"][0]], want, most=8)


# Rows g + 8, several heads a CTA, heads shared out over CTAs, a window, sinks, latents.
SHAPES = {
    "8 q heads a kv head": ModelShape(0, 0, 1, 1, 16, 2, 128, 128),
    "one q head a kv head": ModelShape(0, 0, 1, 1, 9, 9, 64, 64),
    "6 q heads, window, sinks": ModelShape(
        0, 0, 1, 1, 12, 2, 64, 64, sliding_window=37, sinks=True
    ),
    "latent": ModelShape(0, 0, 1, 1, 16, 1, 576, 512, latent=True),
    "latent of few columns and heads": ModelShape(0, 0, 1, 1, 4, 1, 576, 64, latent=True),
}
BATCHES = {
    "decode": ((0, 0, 1), (1, 15, 1), (2, 16, 1), (3, 255, 1), (4, 256, 1), (5, 300, 1)),
    "prefill": ((0, 0, 19), (1, 250, 21), (2, 40, 1), (3, 3, 4)),
}


def emulated_attention(library, case: AttentionCase, seed: int, **changes) -> np.ndarray:
    """Return the kernel's result as float32; `changes` are of the cut."""
    tokens, q_heads, k_dim = case.q.shape
    pages, page_size, kv_heads, _ = case.k_pages.shape
    max_pages = case.block_tables.shape[1]
    window, context = case.sliding_window or 0, max_pages * page_size
    cut = paged_attention.cut_work(tokens, q_heads, kv_heads, k_dim, context)
    cut = dataclasses.replace(cut, **changes)
    cut = dataclasses.replace(cut, max_chunks=-(-context // cut.chunk))
    sizes = [tokens, int(case.num_tokens), q_heads, kv_heads, k_dim, case.v_dim, pages, page_size]
    sizes += [max_pages, cut.chunk, cut.max_chunks, window, cut.cta_heads, cut.token_groups]
    sizes = np.array([*sizes, cut.unit_tokens, cut.part_rows], np.int32)
    out = np.full((tokens, q_heads, case.v_dim), np.nan, BF16)
    arrays = [case.q, case.k_pages, case.v_pages, case.block_tables]
    arrays += [case.token_to_seq, case.positions, case.sinks]
    library.emulate(3, seed)
    given = [None if a is None else copied(a) for a in arrays]
    call(library.attention, *given, out, sizes, float(case.options["scale"]))
    return out.astype(np.float32)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_matches_the_reference(library, shape, batch):
    case = attention_case(SHAPES[shape], BATCHES[batch], page_size=16, dtype="bfloat16", padding=2)
    got = emulated_attention(library, case, seed=3)
    o = case.options
    plain = jax.jit(attention_reference.paged_attention, static_argnums=(8, 9, 10))
    want = plain(*case.arrays, o["sinks"], o["scale"], o["v_dim"], o["sliding_window"])
    np.testing.assert_allclose(got, np.asarray(want, np.float32), **TOLERANCE["bfloat16"])


def test_attention_of_a_token_has_the_same_bits_in_any_company(library):
    shape = SHAPES["6 q heads, window, sinks"]
    case = attention_case(shape, BATCHES["prefill"], page_size=32, dtype="bfloat16")
    want = emulated_attention(library, case, seed=1)
    np.testing.assert_array_equal(emulated_attention(library, case, seed=2), want)
    some = np.random.default_rng(0).permutation(len(want))[:11]
    names = ("q", "token_to_seq", "positions")
    picked = {name: getattr(case, name)[some] for name in names}
    fewer = dataclasses.replace(case, **picked, num_tokens=jnp.int32(len(some)))
    np.testing.assert_array_equal(emulated_attention(library, fewer, seed=5), want[some])


@pytest.mark.parametrize("shape", ["6 q heads, window, sinks", "latent of few columns and heads"])
def test_attention_has_the_same_bits_cut_into_chunks_or_whole(library, shape):
    chunks = ((0, 90, 80), (1, 130, 1), (2, 127, 2))  # the first is never cut
    case = attention_case(SHAPES[shape], chunks, page_size=16, dtype="bfloat16")
    whole = emulated_attention(library, case, seed=1, chunk=64, part_rows=1)
    np.testing.assert_array_equal(emulated_attention(library, case, seed=2, chunk=64), whole)
    few = dataclasses.replace(case, num_tokens=jnp.int32(20))  # too few to be left whole
    cut = emulated_attention(library, few, seed=3, chunk=64)
    np.testing.assert_array_equal(cut[:20], whole[:20])
    assert not cut[20:].any()
    if shape.startswith("latent"):  # the number of rows of a unit changes no bit either
        q_heads = SHAPES[shape].q_heads
        wide = {"token_groups": 2, "unit_tokens": 32 // q_heads}
        two = emulated_attention(library, case, seed=5, chunk=64, part_rows=1, **wide)
        np.testing.assert_array_equal(two, whole)
    near = emulated_attention(library, case, seed=4)
    np.testing.assert_allclose(near, whole, **TOLERANCE["bfloat16"])


@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize(
    ("rows", "d_out", "d_in"), [(1, 64, 1408), (37, 192, 320), (70, 3008, 64), (150, 192, 64)]
)
@pytest.mark.parametrize("accumulate", [True, False])
def test_lora_matches_float64(library, rows, d_out, d_in, experts, modules, accumulate):
    """Modules differ in y and in where the slots' weights are, here turned by one slot.

    Without accumulation what y held does not matter, and every row of it is written.
    """
    case = lora_case(
        rows, d_out, d_in, ranks=(16, 8, 0, 40, 1, 13), num_experts=experts, dtype="bfloat16"
    )
    slots, max_rank = len(case.scaling), case.max_rank
    entries = np.stack([np.roll(case.entries, m, 0) for m in range(modules)])
    scaling = np.stack([copied(case.scaling) + m for m in range(modules)])
    y = np.stack([copied(case.y)] * modules)
    owners = copied(case.row_to_slot)
    if not accumulate:
        y[:] = np.nan
    which = np.zeros(rows, np.int32) if case.row_to_expert is None else copied(case.row_to_expert)
    pools = [copied(a) for a in (case.x, case.a_pool, case.b_pool)]
    sizes = (modules, rows, d_out, d_in, len(case.a_pool), len(case.b_pool), slots, max_rank)
    library.emulate(1, rows)
    cut = 8 if rows <= 128 else 32
    call(library.lora, y, *pools, entries, scaling, owners, which, *sizes, cut, int(accumulate))
    want = np.stack([np.asarray(case.y, np.float64) * accumulate] * modules)
    x, a_pool, b_pool = (np.asarray(v, np.float64) for v in (case.x, case.a_pool, case.b_pool))
    for m, (row, slot) in itertools.product(range(modules), enumerate(owners)):
        if slot < 0:
            continue
        a_row, b_row, rank, a_stride, b_stride = entries[m, slot]
        a, b = a_pool[a_row + which[row] * a_stride :], b_pool[b_row + which[row] * b_stride :]
        h = float(scaling[m, slot]) * (x[row] @ a[:rank].T)
        want[m, row] += h.astype(BF16).astype(np.float64) @ b[:rank]
    np.testing.assert_allclose(y.astype(np.float64), want, **TOLERANCE["bfloat16"])
    if not accumulate:
        assert not y[:, owners < 0].view(np.uint16).any()


@pytest.mark.parametrize("modules", [1, 2])
def test_lora_has_the_same_bits_however_it_is_shared_out(library, modules):
    """Second slices go to the other end of the grid; columns are drawn of four runs of items."""
    rows, d_out, d_in, ranks = (
        135,
        8192,
        64,
        (17, 8, 24, 1),
    )  # 128 and fewer have a kernel of their own
    case = lora_case(rows, d_out, d_in, ranks=ranks, num_experts=0, dtype="bfloat16")
    owners = np.maximum(np.arange(rows) % 9 - 5, 0).astype(np.int32)  # slot 0 has 90
    entries, scaling = (np.stack([copied(v)] * modules) for v in (case.entries, case.scaling))
    x, *pools = (copied(a) for a in (case.x, case.a_pool, case.b_pool))
    heights = len(case.a_pool), len(case.b_pool), len(ranks), case.max_rank

    def added(which, sms, item_rows):
        y = np.stack([copied(case.y)[which]] * modules)
        whose, experts = owners[which], np.zeros(len(which), np.int32)
        sizes = (modules, len(which), d_out, d_in, *heights, item_rows, 1)
        library.emulate(sms, item_rows)
        call(library.lora, y, x[which], *pools, entries, scaling, whose, experts, *sizes)
        return y.view(np.uint16)

    some = np.arange(0, rows, 10)
    want = np.concatenate([added(np.array([row]), 1, 8) for row in some], 1)
    for sms, item_rows in ((1, 32), (2, 16)):
        np.testing.assert_array_equal(added(np.arange(rows), sms, item_rows)[:, some], want)


@pytest.mark.parametrize(("d_out", "d_in", "ranks"), [(192, 320, (16, 0, 40)), (64, 1408, (64,))])
@pytest.mark.parametrize("rows", [1, 9, 128])
def test_few_rows_have_the_bits_that_they_have_among_many(library, rows, d_out, d_in, ranks):
    case = lora_case(200, d_out, d_in, ranks=ranks, dtype="bfloat16")
    tables = [copied(a) for a in (case.a_pool, case.b_pool, case.entries, case.scaling)]
    some = np.random.default_rng(rows).permutation(200)[:rows]

    def added(which: np.ndarray, item_rows: int) -> np.ndarray:
        y, x, owners = (copied(v)[which] for v in (case.y, case.x, case.row_to_slot))
        sizes = (1, len(which), d_out, d_in, len(tables[0]), len(tables[1]), len(ranks))
        experts = np.zeros(len(which), np.int32)
        more = (*sizes, case.max_rank, item_rows, 1)
        call(library.lora, y, x, *tables, owners, experts, *more)
        return y

    library.emulate(2, rows)
    many, few = added(np.arange(200), 32), added(some, 8)
    np.testing.assert_array_equal(few.view(np.uint16), many[some].view(np.uint16))


@pytest.mark.parametrize(
    ("rows", "gaps"), [(1, (1,)), (7, (0,)), (90, (0, 3, 40)), (90, (31,)), (4000, (0, 0, 0, 1, 2))]
)
def test_rows_of_no_item_become_zero_wherever_they_stand(library, rows, gaps):
    """Items of up to 3 rows, a gap before each, the gaps in turn; warps share the places."""
    rng, items, owned, begin = np.random.default_rng(rows), [], np.zeros(rows, bool), gaps[0]
    while begin < rows:
        count = min(len(items) % 3 + 1, rows - begin)
        items.append((0, 0, begin, count))
        owned[begin : begin + count] = True
        begin += count + gaps[len(items) % len(gaps)]
    order, y = rng.permutation(rows).astype(np.int32), np.full((rows, 264), np.nan, BF16)
    listed = np.array([*items, (0, 0, 0, rows)], np.int32)  # what lies behind them does not count
    library.emulate(1, rows)
    call(library.lora_zeros, y, listed, np.array([len(items)], np.int32), order, *y.shape, 3)
    found = np.array(["zero" if not row.view(np.uint16).any() else "left" for row in y[order]])
    np.testing.assert_array_equal(found, np.where(owned, "left", "zero"))
    assert np.isnan(y[order][owned].astype(np.float32)).all()


# The batch's ranks as in the case above; 8 rows make a segment that becomes tiles, unless all such
# segments together have too few, and shorter ones become some where clusters, 3 an SM, can have a
# tile each. The last: how many modules there are, whose weights are those of another slot each; is
# y added to; is the shrink a launch of its own.
@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "ranks", "total", "sms", "modules", "adds", "apart"),
    [
        (70, 128, 64, (16, 8, 0, 40, 1, 13), 8, 1, 2, True, False),
        (70, 128, 64, (16, 8, 0, 40, 1, 13), 8, 1, 1, False, True),
        (50, 128, 64, (16, 8, 0, 40, 1, 13), 8, 2, 1, False, True),
        (300, 640, 320, (64, 33), 8, 2, 1, True, False),
        (90, 64, 192, (7, 100, 128), 8, 2, 2, False, False),
        (60, 192, 192, (128, 100, 7), 8, 2, 1, True, True),
        (40, 64, 4224, (30,), 8, 2, 1, True, False),
        (40, 64, 128, (8,), 41, 2, 1, False, False),
    ],
)
def test_tiles_have_the_bits_of_items(
    library, rows, d_out, d_in, ranks, total, sms, modules, adds, apart
):
    case = lora_case(rows, d_out, d_in, ranks=ranks, dtype="bfloat16")
    slots, max_rank = len(case.scaling), case.max_rank
    entries = np.stack([np.roll(case.entries, m, 0) for m in range(modules)])
    scaling = np.stack([copied(case.scaling) + m for m in range(modules)])
    pools = [*(copied(a) for a in (case.x, case.a_pool, case.b_pool)), entries, scaling]
    owners, which, left = copied(case.row_to_slot), np.zeros(rows, np.int32), np.zeros(1, np.int32)
    want, got = (np.stack([copied(case.y)] * modules) for _ in range(2))
    if not adds:
        want[:], got[:] = np.nan, np.nan
    sizes = (modules, rows, d_out, d_in, len(case.a_pool), len(case.b_pool), slots, max_rank, 8)
    library.emulate(1, rows)
    call(library.lora, want, *pools, owners, which, *sizes, adds)
    library.emulate(sms, rows)
    call(library.lora_tiles, got, *pools, owners, which, *sizes, total, adds, apart, left)
    counts = np.bincount(owners[(owners >= 0) & (owners < slots)], minlength=slots)
    long = counts[counts >= 8].sum()
    fit = np.sum(-(-counts // 64)) <= 3 * sms
    tiled = ((counts >= 8) | fit) & (long >= total) & (long >= counts.sum() * 3 / 4)
    assert left[0] == counts[~tiled].sum()
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize(
    ("long", "rank", "sms"),
    [((0,), 8, 4), ((3, 11, 29), 9, 16), ((7,), 8, 2), ((0, 1, 2, 3), 8, 4)],
)
def test_a_shrink_alone_serves_every_slice_of_long_items(library, long, rank, sms):
    """Of items with more than 16 rows, two slices a unit; 8, 32, 4 and 8 CTAs have them and others.

    The last has too many for the CTAs that could have fewer others.
    """
    counts = np.where(np.isin(np.arange(44), long), 37, 1)
    rows, d_in, slots = int(counts.sum()), 64, len(counts)
    case = lora_case(rows, 64, d_in, ranks=(rank,) * slots, dtype="bfloat16")
    owners, which = np.repeat(np.arange(slots), counts).astype(np.int32), np.zeros(rows, np.int32)
    pools = [copied(a) for a in (case.x, case.a_pool, case.b_pool, case.entries, case.scaling)]
    sizes = (1, rows, 64, d_in, len(case.a_pool), len(case.b_pool), slots, rank)
    want, got, left = copied(case.y), copied(case.y), np.zeros(1, np.int32)
    library.emulate(1, rows)
    call(library.lora, want, *pools, owners, which, *sizes, 8, True)
    library.emulate(sms, rows)
    no_tiles = rows + 1
    call(library.lora_tiles, got, *pools, owners, which, *sizes, 8, no_tiles, True, True, left)
    assert left[0] == rows
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
