"""The CUDA kernels' own code on a CPU: right numbers, whatever the order in which copies arrive.

Threads are fibers and PTX is C++ here (emulator/), so this shows indices, barriers and ranges;
time, registers and memory order only show on a GPU.
"""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cuda_emulator import call, compile_library
from tolerance import TOLERANCE

from cuda_backend import paged_attention
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
    [(40, 64, (16, 0, 3)), (260, 128, (17, 32)), (70, 2112, (64, 33)), (140, 64, (128, 100))],
)
def test_merge_matches_float64(library, d_out, d_in, ranks):
    case = merge_case(len(ranks), d_out, d_in, ranks=ranks, dtype="bfloat16")
    w = copied(case.w)
    arrays = [copied(a) for a in case.arrays[1:]]
    library.emulate(1, 7)
    call(library.merge, w, *arrays, len(ranks), d_out, d_in, case.max_rank)
    want = np.asarray(case.w, np.float64)
    a_pool, b_pool = (np.asarray(v, np.float64) for v in (case.a_pool, case.b_pool))
    for m, (a_row, b_row, rank) in enumerate(np.asarray(case.sites)):
        want[m] += float(case.scaling[m]) * b_pool[b_row:][:rank].T @ a_pool[a_row:][:rank]
    np.testing.assert_allclose(w.astype(np.float64), want, **TOLERANCE["bfloat16"])
    np.testing.assert_array_equal(w[case.sites[:, 2] == 0], copied(case.w)[case.sites[:, 2] == 0])


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


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "slots"),
    [(1, 1, 1, 0), (5, 2, 8, 0), (300, 8, 128, 0), (9, 4, 16, 3), (700, 6, 64, 40)],
)
def test_reroute_is_the_references(library, tokens, k, experts, slots):
    rng = np.random.default_rng(tokens)
    groups, live = experts + slots * 13, max(1, tokens - 3)
    ids = rng.integers(-1, experts + 1, (tokens, k)).astype(np.int32)
    owners = rng.integers(-1, slots + 1, tokens).astype(np.int32)
    table = rng.integers(0, groups, (max(slots, 1), experts)).astype(np.int32)
    order, inverse, sizes = (np.full(n, -7, np.int32) for n in (ids.size, ids.size, groups))
    given = (owners, table) if slots else (None, None)
    library.emulate(1, tokens)
    shape = (live, tokens, k, slots, experts, groups)
    call(library.reroute, ids, *given, *shape, order, inverse, sizes)
    ids, live = jnp.asarray(ids), jnp.int32(live)
    if slots:
        want = reroute_reference.reroute(ids, jnp.asarray(owners), jnp.asarray(table), live, groups)
    else:
        want = reroute_reference.row_map(ids, live, groups)
    for mine, theirs in zip((order, inverse, sizes), want, strict=True):
        np.testing.assert_array_equal(mine, theirs)


# Rows g + 8, several heads and slices a CTA, heads shared out over CTAs, a window, sinks, a latent.
SHAPES = {
    "8 q heads a kv head": ModelShape(0, 0, 1, 1, 16, 2, 128, 128),
    "one q head a kv head": ModelShape(0, 0, 1, 1, 9, 9, 64, 64),
    "6 q heads, window, sinks": ModelShape(
        0, 0, 1, 1, 12, 2, 64, 64, sliding_window=37, sinks=True
    ),
    "latent": ModelShape(0, 0, 1, 1, 16, 1, 192, 128, latent=True),
    "latent in slices": ModelShape(0, 0, 1, 1, 4, 1, 320, 256, latent=True),
}
BATCHES = {
    "decode": ((0, 0, 1), (1, 15, 1), (2, 16, 1), (3, 255, 1), (4, 256, 1), (5, 300, 1)),
    "prefill": ((0, 0, 19), (1, 250, 21), (2, 40, 1), (3, 3, 4)),
}


def emulated_attention(library, case: AttentionCase, seed: int) -> np.ndarray:
    """Return the kernel's result as float32."""
    tokens, q_heads, k_dim = case.q.shape
    pages, page_size, kv_heads, _ = case.k_pages.shape
    max_pages = case.block_tables.shape[1]
    latent, window = case.v_pages is None, case.sliding_window or 0
    context = max_pages * page_size
    cut = paged_attention.cut_work(q_heads, kv_heads, k_dim, case.v_dim, latent, context)
    sizes = [tokens, int(case.num_tokens), q_heads, kv_heads, k_dim, case.v_dim, pages, page_size]
    sizes += [max_pages, cut.chunk, cut.max_chunks, window, cut.cta_heads, cut.token_groups]
    sizes = np.array([*sizes, cut.unit_tokens], np.int32)
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


@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize(("rows", "d_out", "d_in"), [(1, 64, 128), (37, 192, 320), (70, 128, 64)])
def test_lora_matches_float64(library, rows, d_out, d_in, experts):
    case = lora_case(
        rows, d_out, d_in, ranks=(16, 8, 0, 40, 1, 13), num_experts=experts, dtype="bfloat16"
    )
    slots, max_rank = len(case.scaling), case.max_rank
    y = copied(case.y)
    owners = copied(case.row_to_slot)
    which = np.zeros(rows, np.int32) if case.row_to_expert is None else copied(case.row_to_expert)
    pools = [copied(a) for a in (case.x, case.a_pool, case.b_pool, case.entries, case.scaling)]
    sizes = (rows, d_out, d_in, len(case.a_pool), len(case.b_pool), slots, max_rank)
    library.emulate(1, rows)
    call(library.lora, y, *pools, owners, which, *sizes, 8 if rows <= 64 else 32)
    want = np.asarray(case.y, np.float64)
    x, a_pool, b_pool = (np.asarray(v, np.float64) for v in (case.x, case.a_pool, case.b_pool))
    for row, slot in enumerate(owners):
        a_row, b_row, rank, a_stride, b_stride = np.asarray(case.entries)[slot]
        a, b = a_pool[a_row + which[row] * a_stride :], b_pool[b_row + which[row] * b_stride :]
        h = float(case.scaling[slot]) * (x[row] @ a[:rank].T)
        want[row] += h.astype(BF16).astype(np.float64) @ b[:rank]
    np.testing.assert_allclose(y.astype(np.float64), want, **TOLERANCE["bfloat16"])
