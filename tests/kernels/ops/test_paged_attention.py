"""Paged attention: all implementations against float64; chunks and neighbours change no bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.cases import MODELS, AttentionCase, ModelShape, attention_case
from lora_jax.ops.paged_attention import paged_attention

IMPLEMENTATIONS = ["ffi", "xla", "reference"]
# (sequence, first position, tokens): decode, whole prefill, a chunk in the middle, one token.
MIXED = ((2, 30, 1), (0, 0, 21), (1, 9, 14), (3, 0, 1), (4, 17, 1))
SHAPES = {
    "tiny": MODELS["tiny"],
    "odd": MODELS["odd"],
    "odd-latent": MODELS["odd-latent"],
    "mha-64": dataclasses.replace(MODELS["llama-100m"], q_heads=4, kv_heads=4),
    "gqa-128": dataclasses.replace(MODELS["llama-8b"], q_heads=8, kv_heads=2),
    "gpt-oss": dataclasses.replace(MODELS["gpt-oss-20b"], q_heads=16, kv_heads=2, sliding_window=5),
    "latent-576": dataclasses.replace(MODELS["deepseek-v2-lite"], q_heads=3),
}


def oracle(case: AttentionCase) -> np.ndarray:
    """Return the answer in float64, token by token."""
    q, k_pages = np.asarray(case.q, np.float64), np.asarray(case.k_pages, np.float64)
    v_pages = k_pages if case.v_pages is None else np.asarray(case.v_pages, np.float64)
    page_size, kv_heads = k_pages.shape[1:3]
    group = q.shape[1] // kv_heads
    out = np.zeros((*q.shape[:2], case.v_dim))
    for t in range(int(case.num_tokens)):
        last = int(case.positions[t])
        first = 0 if case.sliding_window is None else max(0, last - case.sliding_window + 1)
        place = np.arange(first, last + 1)
        page = np.asarray(case.block_tables)[int(case.token_to_seq[t]), place // page_size]
        for head in range(q.shape[1]):
            k = k_pages[page, place % page_size, head // group]
            v = v_pages[page, place % page_size, head // group, : case.v_dim]
            logits = k @ q[t, head] / np.sqrt(q.shape[2])
            sink = [] if case.sinks is None else [float(case.sinks[head])]
            p = np.exp(np.array([*logits, *sink]) - max([*logits, *sink]))
            out[t, head] = p[: len(logits)] @ v / p.sum()
    return out


STATIC = ("scale", "v_dim", "sliding_window", "implementation")
jitted = functools.partial(jax.jit, static_argnames=STATIC)(paged_attention)


def run(case: AttentionCase, implementation: str | None = "ffi") -> np.ndarray:
    """Return the op's result under jit, as float32 (exact for bfloat16)."""
    got = jitted(*case.arrays, **case.options, implementation=implementation)
    return np.asarray(got, np.float32)


def tokens_of(case: AttentionCase, tokens: np.ndarray) -> AttentionCase:
    """Return the case with only these tokens, in this order."""
    return dataclasses.replace(
        case,
        q=case.q[tokens],
        token_to_seq=case.token_to_seq[tokens],
        positions=case.positions[tokens],
        num_tokens=jnp.int32(len(tokens)),
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_kernel_matches_float64(shape: ModelShape, dtype):
    case = attention_case(shape, MIXED, dtype=dtype, padding=3)
    np.testing.assert_allclose(run(case), oracle(case), **TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("tiny", "bfloat16"), ("odd", "float32"), ("odd-latent", "float32"), ("gpt-oss", "bfloat16")],
)
def test_portable_jax_matches_float64(name, dtype, implementation):
    case = attention_case(SHAPES[name], MIXED, dtype=dtype, padding=3)
    np.testing.assert_allclose(run(case, implementation), oracle(case), **TOLERANCE[dtype])


@pytest.mark.long
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_context_of_many_pages(implementation):
    case = attention_case(SHAPES["mha-64"], ((0, 500, 1), (1, 290, 20)), page_size=16)
    np.testing.assert_allclose(run(case, implementation), oracle(case), **TOLERANCE["float32"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_tokens_are_exactly_zero(implementation):
    case = attention_case(SHAPES["odd"], MIXED, padding=5)
    assert not run(case, implementation)[-5:].any()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_chunks_and_neighbours_change_no_bit(shape: ModelShape, dtype):
    """One prefill at once, in chunks of any size, token by token, in any company: the same bits."""
    case = attention_case(shape, ((0, 0, 45), (1, 0, 30)), dtype=dtype)
    want = run(case)
    for chunk in (1, 7, 16):
        parts = [np.arange(a, min(a + chunk, 45)) for a in range(0, 45, chunk)]
        got = np.concatenate([run(tokens_of(case, part)) for part in parts[-3:]])
        np.testing.assert_array_equal(got, want[parts[-3][0] : 45])
    order = np.random.default_rng(3).permutation(75)
    np.testing.assert_array_equal(run(tokens_of(case, order)), want[order])


@pytest.mark.parametrize("page_size", [1, 3, 8, 16])
def test_the_layout_of_pages_changes_no_bit(page_size):
    """The same K and V in pages of another size at other places."""
    case = attention_case(SHAPES["odd"], ((0, 0, 40),), page_size=5)
    assert case.v_pages is not None
    table = np.asarray(case.block_tables)[0]
    k, v = (
        np.asarray(pages)[table].reshape(-1, *pages.shape[2:])[:40]
        for pages in (case.k_pages, case.v_pages)
    )
    pages = -(-40 // page_size)
    new_table = np.random.default_rng(4).permutation(pages)

    def repaged(rows: np.ndarray) -> jax.Array:
        out = np.zeros((pages, page_size, *rows.shape[1:]), rows.dtype)
        padded = np.concatenate([rows, np.zeros((pages * page_size - 40, *rows.shape[1:]))])
        out[new_table] = padded.reshape(out.shape)
        return jnp.asarray(out)

    moved = dataclasses.replace(
        case,
        k_pages=repaged(k),
        v_pages=repaged(v),
        block_tables=jnp.asarray(new_table[None], jnp.int32),
    )
    np.testing.assert_array_equal(run(moved), run(case))


def test_many_threads_give_the_same_bits():
    """A prefill large enough for threads against its last tokens alone."""
    case = attention_case(MODELS["llama-100m"], ((0, 0, 300),), page_size=16)
    want = run(case)
    np.testing.assert_array_equal(run(tokens_of(case, np.array([299, 5]))), want[[299, 5]])


def test_reads_pages_of_a_donated_cache_without_a_copy():
    case = attention_case(SHAPES["mha-64"], MIXED)
    q, k, v, *rest = case.arrays

    def step(k, v, q, *rest):
        k = k.at[0].set(1.0)
        return paged_attention(q, k, v, *rest, **case.options, implementation="ffi"), k, v

    program = jax.jit(step, donate_argnums=(0, 1)).lower(k, v, q, *rest).compile()
    assert " copy(" not in program.as_text()


def test_a_position_outside_the_block_tables_is_an_error():
    case = attention_case(SHAPES["tiny"], ((0, 0, 4),))
    wrong = dataclasses.replace(case, positions=case.positions + 1000)
    with pytest.raises(Exception, match="outside the block tables"):
        run(wrong)


@pytest.mark.usefixtures("shapes_unchecked")
def test_refuses_sizes_that_do_not_fit():
    case = attention_case(SHAPES["tiny"], ((0, 0, 4),))
    options = case.options
    with pytest.raises(ValueError, match="6 q heads over 4 kv heads"):
        paged_attention(case.q[:, :6], *case.arrays[1:], **options)
    q, k, v, tables, seqs, positions, num_tokens = case.arrays
    with pytest.raises(ValueError, match=r"positions has shape \(3,\), expected \(4,\)"):
        paged_attention(q, k, v, tables, seqs, positions[:3], num_tokens, **options)
    with pytest.raises(ValueError, match=r"block_tables \(1, 2\) is float32, expected int32"):
        paged_attention(q, k, v, tables.astype("float32"), seqs, positions, num_tokens, **options)
    with pytest.raises(ValueError, match="sliding_window 0"):
        paged_attention(*case.arrays, **{**options, "sliding_window": 0})
    latent = (q, k, None, tables, seqs, positions, num_tokens)
    with pytest.raises(ValueError, match="v_dim 9 is not within k_dim 8"):
        paged_attention(*latent, **{**options, "v_dim": 9})
