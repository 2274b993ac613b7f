"""Paged attention on Hopper: against the reference, same bits in any company; what it declines.

Of models in bfloat16 by tensor cores, and of what these do not take by multiply-adds.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.kernel_calls import attention_kernel
from support.oracles.tolerance import TOLERANCE

from cuda_backend import paged_attention as cuda
from lora_jax.ops.cases import MODELS, AttentionCase, ModelShape, attention_case
from lora_jax.ops.kv_rows import coded, decoded
from lora_jax.ops.paged_attention import reference

SERVED = ("llama-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite", "dbrx", "llama-100m")
DECODE = ((0, 0, 1), (1, 15, 1), (2, 16, 1), (3, 255, 1), (4, 256, 1), (5, 700, 1), (6, 1030, 1))
PREFILL = ((0, 0, 37), (1, 250, 21), (2, 600, 1), (3, 16, 100))
# Enough for whole warpgroups: runs of many neighbours, and others beside them.
PROMPTS = ((0, 0, 200), (1, 250, 90), (2, 600, 1), (3, 16, 70), (4, 5, 33))
BATCHES = {"decode": DECODE, "prefill": PREFILL, "prompts": PROMPTS}


# dtype, positions of a page, sizes
PLAIN = {
    "float32, 8 q heads a kv head": ("float32", 16, MODELS["qwen3-30b-a3b"]),
    "float32, one": ("float32", 64, MODELS["llama-100m"]),
    "float32, window and sinks": ("float32", 16, MODELS["gpt-oss-20b"]),
    "float32, latent": ("float32", 16, MODELS["deepseek-v2-lite"]),
    "float32, odd": ("float32", 4, MODELS["odd"]),
    "heads of 96": ("bfloat16", 16, ModelShape(0, 0, 1, 1, 8, 8, 96, 96)),
    "heads of 256": ("bfloat16", 16, ModelShape(0, 0, 1, 1, 8, 2, 256, 256)),
    "20 q heads a kv head": ("bfloat16", 8, ModelShape(0, 0, 1, 1, 40, 2, 80, 80)),
    "values of 320": ("bfloat16", 16, ModelShape(0, 0, 1, 1, 4, 2, 544, 320)),
}


def some_case(model: str, chunks, **options) -> AttentionCase:
    options = {"page_size": 16, "dtype": "bfloat16", "padding": 3, **options}
    return attention_case(MODELS[model], chunks, **options)


def plain_case(name: str, chunks, padding: int = 3) -> AttentionCase:
    dtype, page_size, sizes = PLAIN[name]
    return attention_case(sizes, chunks, page_size=page_size, dtype=dtype, padding=padding)


@functools.partial(jax.jit, static_argnames=("scale", "v_dim", "sliding_window"))
def kernel(*arrays, sinks, scale, v_dim, sliding_window):
    return attention_kernel(cuda.paged_attention)(*arrays, sinks, scale, v_dim, sliding_window)


def run(case: AttentionCase) -> np.ndarray:
    """Return the kernel's result as float32, which is exact."""
    return np.asarray(kernel(*case.arrays, **case.options).astype(jnp.float32))


def oracle(case: AttentionCase) -> np.ndarray:
    """Return the reference's result."""
    o = case.options
    arrays = (*case.arrays, o["sinks"], o["scale"], o["v_dim"], o["sliding_window"])
    return np.asarray(
        jax.jit(attention_kernel(reference.paged_attention), static_argnums=(8, 9, 10))(*arrays)
    ).astype(np.float32)


def tokens_of(case: AttentionCase, some: np.ndarray) -> AttentionCase:
    """Return the case with only these tokens, in this order."""
    names = ("q", "token_to_seq", "positions")
    picked = {name: getattr(case, name)[some] for name in names}
    return dataclasses.replace(case, **picked, num_tokens=jnp.int32(len(some)))


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("model", SERVED)
def test_matches_the_reference(model, chunks):
    case = some_case(model, chunks)
    np.testing.assert_allclose(run(case), oracle(case), **TOLERANCE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("model", SERVED)
def test_pages_in_8_bits_have_the_bits_of_pages_of_their_values(model, chunks):
    case = some_case(model, chunks)
    rows = {
        name: None if pages is None else coded(pages)
        for name, pages in (("k_pages", case.k_pages), ("v_pages", case.v_pages))
    }
    values = {
        name: None if of is None else decoded(of).astype(jnp.bfloat16) for name, of in rows.items()
    }
    got, want = (run(dataclasses.replace(case, **pages)) for pages in (rows, values))
    np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
def test_pages_of_64_positions():
    case = some_case("qwen3-30b-a3b", DECODE, page_size=64)
    np.testing.assert_allclose(run(case), oracle(case), **TOLERANCE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_a_token_has_the_same_bits_whatever_its_neighbours(model):
    case = some_case(model, PREFILL, padding=0)
    want = run(case)
    np.testing.assert_array_equal(run(case), want)
    rng = np.random.default_rng(0)
    for count in (1, 2, 50):
        some = rng.permutation(len(want))[:count]
        np.testing.assert_array_equal(run(tokens_of(case, some)), want[some])


@pytest.mark.gpu
@pytest.mark.parametrize("model", SERVED)
def test_a_long_prompt_has_the_bits_of_its_tokens_alone(model):
    # Neighbours in a prompt go through all chunks; few tokens are cut into chunks.
    case = some_case(model, ((0, 700, 260), (1, 900, 1), (2, 0, 30)), padding=0)
    want = run(case)
    np.testing.assert_allclose(want, oracle(case), **TOLERANCE["bfloat16"])
    some = np.random.default_rng(0).permutation(len(want))[:40]
    np.testing.assert_array_equal(run(tokens_of(case, some)), want[some])


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("name", PLAIN)
def test_without_tensor_cores_it_matches_the_reference(name, chunks):
    case = plain_case(name, chunks)
    np.testing.assert_allclose(run(case), oracle(case), **TOLERANCE[PLAIN[name][0]])


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAIN)
def test_without_tensor_cores_a_token_has_the_same_bits_whatever_its_neighbours(name):
    case = plain_case(name, ((0, 700, 260), (1, 900, 1), (2, 0, 30)), padding=0)
    want = run(case)
    np.testing.assert_array_equal(run(case), want)
    some = np.random.default_rng(0).permutation(len(want))[:40]
    np.testing.assert_array_equal(run(tokens_of(case, some)), want[some])


@pytest.mark.gpu
def test_padding_gives_zero():
    for chunks in (DECODE, PROMPTS):
        case = some_case("llama-8b", chunks, padding=5)
        assert not run(case)[sum(count for _, _, count in chunks) :].any()


@pytest.mark.parametrize("model", SERVED)
@pytest.mark.parametrize("context", [16, 2048, 32768, 131072])
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_the_cut_covers_the_context_and_fits_a_cta(tokens, model, context):
    m = MODELS[model]
    cut = cuda.cut_work(tokens, m.q_heads, m.kv_heads, m.k_dim, context)
    assert cut.chunk % 64 == 0  # whole steps of consumers
    assert (cut.max_chunks - 1) * cut.chunk < context <= cut.max_chunks * cut.chunk
    assert cut.max_chunks <= cuda.MOST_CHUNKS
    assert m.kv_heads % cut.cta_heads == 0
    assert 1 <= cut.cta_heads * cut.token_groups <= cuda.CONSUMERS
    assert m.latent or cut.cta_heads * m.k_dim <= cuda.COLUMNS
    assert cut.unit_tokens >= 1
    assert 1 <= cut.part_rows <= tokens


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("context", [16, 2048, 131072])
@pytest.mark.parametrize("tokens", [1, 64, 2048])
def test_the_plain_cut_has_the_rows_that_its_kernel_has_room_for(tokens, name, context):
    _, _, m = PLAIN[name]
    cut, heads = cuda.cut_plain_work(tokens, m.q_heads, m.kv_heads, m.k_dim, context), m.q_heads
    assert (cut.max_chunks - 1) * cut.chunk < context <= cut.max_chunks * cut.chunk
    rows = cuda.plain_rows(cut, m.q_heads, m.kv_heads)
    assert rows in cuda.PLAIN_ROWS
    # Heads beyond the rows of a unit of one token are other units' rows.
    assert cut.unit_tokens == 1 or cut.unit_tokens * heads // m.kv_heads <= rows


@pytest.mark.parametrize("model", SERVED)
def test_the_chunk_depends_on_the_context_alone(model):
    m = MODELS[model]
    chunks = {
        cuda.cut_work(tokens, m.q_heads, m.kv_heads, m.k_dim, 20000).chunk
        for tokens in (1, 64, 300, 8192)
    }
    assert len(chunks) == 1


@pytest.mark.parametrize("context", [2048, 40960, 131072])
def test_rows_that_decode_are_cut_into_small_chunks_at_any_context(context):
    m = MODELS["llama-8b"]
    for tokens in (1, 128):
        cut = cuda.cut_work(tokens, m.q_heads, m.kv_heads, m.k_dim, context)
        assert cut.chunk <= 512
        assert (cut.part_rows, cut.many_tokens) == (tokens, 0)


def test_few_sequences_set_little_memory_aside():
    work = (32, 8, 128, 131072)  # heads, columns and context of Llama-3.1-8B
    rows = {
        seqs: [cuda.cut_work(t, *work, seqs=seqs).part_rows for t in (8, 32, 128, 512)]
        for seqs in (8, 256)
    }
    assert rows == {8: [8, 16, 16, 16], 256: [8, 32, 128, 32]}


@pytest.mark.parametrize(("tokens", "seqs", "heads"), [(8, 8, 4), (128, 8, 2), (200, 200, 2)])
def test_pages_in_8_bits_have_room_where_some_tokens_are_not_cut(tokens, seqs, heads):
    cut = cuda.cut_work(tokens, 32, 8, 128, 131072, seqs=seqs, coded=True)
    assert cut.cta_heads == heads


HEADS = {"q_heads": 32, "kv_heads": 8, "k_dim": 128, "v_dim": 128, "latent": False}
LATENT = {"q_heads": 16, "kv_heads": 1, "k_dim": 576, "v_dim": 512, "latent": True}


@pytest.mark.parametrize(
    ("fine", "change"),
    [
        (HEADS, {"dtype": jnp.dtype("float32")}),
        (HEADS, {"q_heads": 136}),
        (HEADS, {"k_dim": 72}),
        (HEADS, {"v_dim": 64}),
        (HEADS, {"page_size": 8}),
        (LATENT, {"k_dim": 320}),
        (LATENT, {"kv_heads": 2}),
        (LATENT, {"v_dim": 72}),
    ],
)
def test_tensor_cores_have_tiles_for_some_sizes(fine, change):
    fine = {"dtype": jnp.dtype("bfloat16"), "page_size": 16, **fine}
    assert cuda.fits_tiles(**fine)
    assert not cuda.fits_tiles(**{**fine, **change})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": 9000}, "8192 tokens, not 9000"),
        ({"k_dim": 44}, "steps of 8 columns, .* not 44 and 512"),
        ({"v_dim": 6, "dtype": jnp.dtype("float32")}, "steps of 4 columns, .* not 576 and 6"),
        ({"k_dim": 640}, "up to 576 of K and 512 of V, not 640 and 512"),
        ({"v_dim": 520}, "not 576 and 520"),
    ],
)
def test_declines_what_it_cannot_serve(change, why):
    fine = {"dtype": jnp.dtype("bfloat16"), "tokens": 7, "k_dim": 576, "v_dim": 512}
    cuda.check_support(**fine)
    with pytest.raises(NotImplementedError, match=why):
        cuda.check_support(**{**fine, **change})
