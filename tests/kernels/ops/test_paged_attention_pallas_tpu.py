"""The TPU kernel of paged attention, interpreted: the reference's result, chunks, no races."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.kernel_calls import attention_kernel
from support.doubles.tpu_interpreter import interpreted
from support.drivers.lowering import TpuKernel, tpu_kernels
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.cases import MODELS, AttentionCase, ModelShape, attention_case
from lora_jax.ops.paged_attention import paged_attention, pallas_tpu, reference

# (sequence, first position, tokens): decode, whole prefill, a chunk in the middle, one token, and
# one in the second block of positions.
MIXED = ((2, 30, 1), (0, 0, 6), (1, 9, 5), (3, 0, 1), (4, 270, 1))
SHAPES = {
    "gqa": dataclasses.replace(MODELS["llama-8b"], q_heads=4, kv_heads=2),
    "window-and-sinks": dataclasses.replace(
        MODELS["gpt-oss-20b"], q_heads=6, kv_heads=2, k_dim=128, v_dim=128, sliding_window=7
    ),
    "latent": dataclasses.replace(MODELS["deepseek-v2-lite"], q_heads=3, k_dim=192, v_dim=128),
}


meaning = jax.jit(attention_kernel(reference.paged_attention), static_argnums=(8, 9, 10))


@functools.cache
def kernel(scale: float, v_dim: int, sliding_window: int | None):
    return interpreted(
        functools.partial(attention_kernel(pallas_tpu.paged_attention), scale=scale, v_dim=v_dim),
        sliding_window=sliding_window,
    )


def run(case: AttentionCase) -> np.ndarray:
    options = case.options
    on_tpu = kernel(options["scale"], case.v_dim, case.sliding_window)
    return on_tpu(*case.arrays, case.sinks)


def assert_right(case: AttentionCase, got: np.ndarray):
    options = case.options
    rest = (options["scale"], case.v_dim, case.sliding_window)
    want = np.asarray(meaning(*case.arrays, case.sinks, *rest), np.float32)
    np.testing.assert_allclose(got, want, **TOLERANCE[case.q.dtype.name])
    assert not got[int(case.num_tokens) :].any()


def tokens_of(case: AttentionCase, tokens: np.ndarray) -> AttentionCase:
    """Return the case with only these tokens, in this order, and as many slots for tokens."""
    room = len(case.q) - len(tokens)
    at = np.concatenate([tokens, np.zeros(room, int)])
    return dataclasses.replace(
        case,
        q=case.q[at],
        token_to_seq=case.token_to_seq[at],
        positions=case.positions[at],
        num_tokens=jnp.int32(len(tokens)),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("gqa", "bfloat16"),
        ("window-and-sinks", "float32"),
        ("latent", "float32"),
        ("latent", "bfloat16"),
    ],
)
def test_matches_the_reference_whatever_the_chunks(name, dtype):
    """Chunks, decode and a wild order of tokens: one result, bit for bit, near the reference's."""
    case = attention_case(SHAPES[name], MIXED, page_size=16, dtype=dtype, padding=3)
    want = run(case)
    assert_right(case, want)
    order = np.random.default_rng(3).permutation(int(case.num_tokens))
    np.testing.assert_array_equal(run(tokens_of(case, order))[: len(order)], want[order])
    chunk = np.arange(3, 6)  # from the middle of the prefill
    np.testing.assert_array_equal(run(tokens_of(case, chunk))[:3], want[chunk])


@pytest.mark.long
def test_no_tokens_at_all_give_zeros():
    case = attention_case(SHAPES["gqa"], MIXED, page_size=16, dtype="bfloat16", padding=3)
    assert not run(dataclasses.replace(case, num_tokens=jnp.int32(0))).any()


@pytest.mark.long
def test_one_token_and_pages_longer_than_a_block():
    case = attention_case(SHAPES["gqa"], ((0, 700, 1),), page_size=512)
    assert_right(case, run(case))


def num_bytes(array: str) -> int:
    """Return the bytes of "vmem 2x8x128xf32"."""
    *sizes, dtype = array.partition(" ")[2].split("x")
    return math.prod(map(int, sizes)) * {"f32": 4, "bf16": 2}[dtype]


def lowered(case: AttentionCase) -> TpuKernel:
    options = {"v_dim": case.v_dim, "sliding_window": case.sliding_window, "interpret": False}
    run = functools.partial(attention_kernel(pallas_tpu.paged_attention), scale=0.1, **options)
    (kernel,) = tpu_kernels(run, *case.arrays, case.sinks)
    return kernel


# What two blocks of K, and of V, take in VMEM: a head's axis is left out where XLA has none.
BLOCKS = {
    "gqa": ("vmem 2x256x2x128xbf16", "vmem 2x256x2x128xbf16"),
    "window-and-sinks": ("vmem 2x256x2x128xbf16", "vmem 2x256x2x128xbf16"),
    "latent": ("vmem 2x256x192xbf16",),
}
# Products of both paths, one token's and several's, for its kv heads.
PRODUCTS = {"gqa": 16, "window-and-sinks": 16, "latent": 8}


@pytest.mark.parametrize("name", BLOCKS)
def test_lowers_for_a_tpu_within_the_memory_that_it_asks_for(name):
    """Six tables come first; pages stay in HBM; everything else fits the bytes that are counted."""
    case = attention_case(SHAPES[name], MIXED, page_size=16, dtype="bfloat16", padding=3)
    made, sinks = lowered(case), case.sinks is not None
    assert (made.name, len(made.prefetched)) == ("paged_attention", 6)
    assert made.operands[1] == f"hbm 17x{case.k_pages.shape[2]}x8x{case.q.shape[2]}xf32"
    pages = made.operands[2:-1]
    assert len(pages) == len(BLOCKS[name]) + sinks
    assert all(array.startswith("hbm") for array in pages[: len(BLOCKS[name])])
    assert made.scratch[8:] == BLOCKS[name]
    took = sum(num_bytes(array) for array in made.scratch if array.startswith("vmem"))
    assert took <= made.vmem_limit - (16 << 20)
    assert made.vmem_limit <= 64 << 20
    assert made.aliases == {7: 0}  # behind the number of items and the tables
    assert made.operations["matmul"] == PRODUCTS[name]


def test_lowers_one_token_without_the_path_of_several():
    several = attention_case(SHAPES["gqa"], ((0, 700, 2),), page_size=512, dtype="bfloat16")
    one = attention_case(SHAPES["gqa"], ((0, 700, 1),), page_size=512, dtype="bfloat16")
    made, more = lowered(one), lowered(several)
    assert made.scratch[-1] == "vmem 2x512x2x128xbf16"  # a page is a block
    assert 2 * made.operations["matmul"] == more.operations["matmul"]


def test_declines_what_it_cannot_serve():
    def case(shape: ModelShape, page_size: int = 16) -> AttentionCase:
        return attention_case(shape, ((0, 0, 2),), page_size=page_size)

    good = case(SHAPES["gqa"])
    with pytest.raises(NotImplementedError, match="runs on a TPU only"):
        paged_attention(*good.arrays, **good.options, implementation="pallas_tpu")
    with pytest.raises(NotImplementedError, match="4 kv heads of 8 and 8"):
        run(case(MODELS["tiny"]))
    with pytest.raises(NotImplementedError, match="pages of 24 positions"):
        run(case(SHAPES["gqa"], page_size=24))
    wide = jnp.zeros((1, 1 << 18), jnp.int32)
    with pytest.raises(NotImplementedError, match="pages in block tables"):
        run(dataclasses.replace(good, block_tables=wide))
