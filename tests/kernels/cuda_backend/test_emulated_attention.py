"""The CUDA kernels of paged attention on a CPU: right numbers, the same bits however they are cut.

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
from support.cases.kernel_calls import attention_kernel
from support.doubles.cuda_emulator import call, copied
from support.oracles.tolerance import TOLERANCE

from cuda_backend import paged_attention
from lora_jax.ops import kv_rows
from lora_jax.ops.cases import (
    MODELS,
    AttentionCase,
    ModelShape,
    attention_case,
)
from lora_jax.ops.kv_rows import CODED
from lora_jax.ops.paged_attention import reference as attention_reference

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
    pytest.mark.long,  # test_emulated.py has a case of the emulator
]
DRIVER = "attention.cc"
BF16 = ml_dtypes.bfloat16


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
    given = (tokens, q_heads, kv_heads, k_dim, context)
    own = (case.q.dtype, q_heads, kv_heads, k_dim, case.v_dim, page_size, case.v_pages is None)
    tiles, dtype = paged_attention.fits_tiles(*own), BF16
    coded = case.k_pages.dtype == CODED
    if tiles:
        cut = paged_attention.cut_work(*given, coded=coded)
    else:
        cut = paged_attention.cut_plain_work(*given)
    cut, kernel = dataclasses.replace(cut, **changes), 3 if coded else 0
    if not tiles:
        rows = paged_attention.plain_rows(cut, q_heads, kv_heads)
        cut, dtype = dataclasses.replace(cut, token_groups=rows), case.q.dtype
        kernel = 1 + (dtype == np.float32)
    cut = dataclasses.replace(cut, max_chunks=-(-context // cut.chunk))
    sizes = [tokens, int(case.num_tokens), q_heads, kv_heads, k_dim, case.v_dim, pages, page_size]
    sizes += [max_pages, cut.chunk, cut.max_chunks, window, cut.cta_heads, cut.token_groups]
    sizes = np.array([*sizes, cut.unit_tokens, cut.many_tokens, cut.part_rows], np.int32)
    out = np.full((tokens, q_heads, case.v_dim), np.nan, dtype)
    arrays = [case.q, case.k_pages, case.v_pages, case.block_tables]
    arrays += [case.token_to_seq, case.positions, case.sinks]
    library.emulate(3, seed)
    given = [None if a is None else copied(a) for a in arrays]
    call(library.attention, *given, out, sizes, float(case.options["scale"]), kernel)
    return out.astype(np.float32)


# Without tensor cores: dtype, positions of a page, sizes.
PLAIN_SHAPES = {
    "float32": ("float32", 16, ModelShape(0, 0, 1, 1, 16, 2, 128, 128)),
    "odd": ("float32", 4, MODELS["odd"]),
    "odd latent": ("float32", 8, MODELS["odd-latent"]),
    "wide values": ("float32", 16, ModelShape(0, 0, 1, 1, 2, 2, 64, 320)),
    "heads of 96": ("bfloat16", 16, ModelShape(0, 0, 1, 1, 4, 4, 96, 96)),
    "20 q heads a kv head": ("bfloat16", 16, ModelShape(0, 0, 1, 1, 40, 2, 80, 80)),
    "K wider than V": ("bfloat16", 16, ModelShape(0, 0, 1, 1, 6, 2, 192, 128)),
}


TILE_SHAPES = {name: ("bfloat16", 16, sizes) for name, sizes in SHAPES.items()}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", [*TILE_SHAPES, *PLAIN_SHAPES])
def test_attention_matches_the_reference(library, shape, batch):
    dtype, page_size, sizes = (TILE_SHAPES | PLAIN_SHAPES)[shape]
    case = attention_case(sizes, BATCHES[batch], page_size=page_size, dtype=dtype, padding=2)
    got = emulated_attention(library, case, seed=3)
    o = case.options
    plain = jax.jit(
        attention_kernel(attention_reference.paged_attention), static_argnums=(8, 9, 10)
    )
    want = plain(*case.arrays, o["sinks"], o["scale"], o["v_dim"], o["sliding_window"])
    np.testing.assert_allclose(got, np.asarray(want, np.float32), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention_of_a_token_has_the_same_bits_in_any_company(library, dtype):
    shape = SHAPES["6 q heads, window, sinks"]
    case = attention_case(shape, BATCHES["prefill"], page_size=32, dtype=dtype)
    want = emulated_attention(library, case, seed=1)
    np.testing.assert_array_equal(emulated_attention(library, case, seed=2), want)
    some = np.random.default_rng(0).permutation(len(want))[:11]
    names = ("q", "token_to_seq", "positions")
    picked = {name: getattr(case, name)[some] for name in names}
    fewer = dataclasses.replace(case, **picked, num_tokens=jnp.int32(len(some)))
    np.testing.assert_array_equal(emulated_attention(library, fewer, seed=5), want[some])


def test_what_follows_waits_for_attention_where_no_sequence_is_cut(library):
    """The emulator ends the process if a kernel that began early waits for nothing."""
    case = attention_case(SHAPES["latent"], ((0, 9, 1), (1, 20, 1)), page_size=128)
    whole = emulated_attention(library, case, seed=1, chunk=128)  # has no kernel for parts
    np.testing.assert_array_equal(emulated_attention(library, case, seed=1, chunk=64), whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_has_the_same_bits_cut_into_chunks_or_whole(library, shape):
    chunks = ((0, 90, 80), (1, 130, 1), (2, 127, 2))  # the first is never cut, its pages are shared
    case = attention_case(SHAPES[shape], chunks, page_size=16, dtype="bfloat16")
    whole = emulated_attention(library, case, seed=1, chunk=64, part_rows=1)
    np.testing.assert_array_equal(emulated_attention(library, case, seed=2, chunk=64), whole)
    few = dataclasses.replace(case, num_tokens=jnp.int32(20))  # too few to be left whole
    cut = emulated_attention(library, few, seed=3, chunk=64)
    np.testing.assert_array_equal(cut[:20], whole[:20])
    assert not cut[20:].any()
    q_heads, kv_heads = SHAPES[shape].q_heads, SHAPES[shape].kv_heads
    if not shape.startswith("latent"):  # whole warpgroups multiply what has many neighbours
        many = {"many_tokens": 8 * (16 // (q_heads // kv_heads)), "part_rows": 3}
        apart = emulated_attention(library, case, seed=6, chunk=64, **many)
        np.testing.assert_array_equal(apart, whole)
    if shape == "latent of few columns and heads":  # nor does the number of rows of a unit
        wide = {"token_groups": 2, "unit_tokens": 32 // q_heads}
        two = emulated_attention(library, case, seed=5, chunk=64, part_rows=1, **wide)
        np.testing.assert_array_equal(two, whole)
    near = emulated_attention(library, case, seed=4)
    np.testing.assert_allclose(near, whole, **TOLERANCE["bfloat16"])


@pytest.mark.parametrize("factor", [1, 64, 4096])
@pytest.mark.parametrize("shape", ["8 q heads a kv head", "6 q heads, window, sinks"])
def test_bases_that_grow_in_the_midst_of_a_chunk_leave_the_right_sums(library, shape, factor):
    """A chunk has several steps of whole warpgroups here; large logits make bases grow.

    64 neighbours are the fewest that are many.
    """
    sizes = SHAPES[shape]
    chunks = ((0, 90, 80), (1, 130, 1), (2, 5, 64), (3, 60, 63))
    case = attention_case(sizes, chunks, page_size=16, dtype="bfloat16", padding=3)
    case = dataclasses.replace(case, q=case.q * factor)
    of_group = 16 // (sizes.q_heads // sizes.kv_heads)
    got = emulated_attention(library, case, seed=1, many_tokens=8 * of_group, part_rows=3)
    whole = emulated_attention(library, case, seed=2, part_rows=1)
    np.testing.assert_array_equal(got, whole)
    o = case.options
    plain = jax.jit(
        attention_kernel(attention_reference.paged_attention), static_argnums=(8, 9, 10)
    )
    want = plain(*case.arrays, o["sinks"], o["scale"], o["v_dim"], o["sliding_window"])
    np.testing.assert_allclose(got, np.asarray(want, np.float32), **TOLERANCE["bfloat16"])


@pytest.mark.parametrize("shape", ["odd", "odd latent", "heads of 96"])
def test_plain_attention_has_the_same_bits_cut_or_whole_in_units_of_any_size(library, shape):
    dtype, page_size, sizes = PLAIN_SHAPES[shape]
    chunks = ((0, 90, 80), (1, 130, 1), (2, 127, 2))  # the first is never cut
    case = attention_case(sizes, chunks, page_size=page_size, dtype=dtype)
    heads = sizes.q_heads // sizes.kv_heads
    whole = emulated_attention(library, case, seed=1, chunk=64, part_rows=1)
    np.testing.assert_array_equal(emulated_attention(library, case, seed=2, chunk=64), whole)
    for rows in (16 // heads, 1):
        units = emulated_attention(library, case, seed=3, chunk=64, unit_tokens=rows)
        np.testing.assert_array_equal(units, whole)
    near = emulated_attention(library, case, seed=4)
    np.testing.assert_allclose(near, whole, **TOLERANCE[dtype])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pages_in_8_bits_have_the_bits_of_pages_with_their_values(library, shape, batch):
    """Some scales are so large that a value is multiplied twice, some rows are no numbers."""
    case = attention_case(SHAPES[shape], BATCHES[batch], page_size=32, dtype="bfloat16", padding=2)
    wide = (2.0 ** np.random.default_rng(2).integers(-3, 3, case.k_pages.shape[:3]))[..., None]
    wide[0, 3, 0] = (
        1e30  # a page that no sequence has: it is brought and never seen, or not brought
    )
    rows, values = {}, {}
    for name in ("k_pages", "v_pages"):
        if (pages := getattr(case, name)) is not None:
            rows[name] = kv_rows.coded(
                jnp.asarray(np.asarray(pages, np.float32) * wide, jnp.float32)
            )
            values[name] = kv_rows.decoded(rows[name]).astype(jnp.bfloat16)
    want = emulated_attention(library, dataclasses.replace(case, **values), seed=3)
    got = emulated_attention(library, dataclasses.replace(case, **rows), seed=4)
    np.testing.assert_array_equal(got, want)
