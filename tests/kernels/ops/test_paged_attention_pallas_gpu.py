"""Paged attention in Mosaic GPU: interpreted on a CPU, lowered for CUDA, run where there is one.

On a GPU: JAX_PLATFORMS=cuda PYTHONPATH=src:tests:. python3 -m pytest --noconftest -m gpu FILE
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support.cases.kernel_calls import attention_kernel
from support.doubles.mosaic import interpreted
from support.drivers.lowering import launches
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.cases import MODELS, AttentionCase, ModelShape, attention_case
from lora_jax.ops.paged_attention import paged_attention, pallas_gpu, reference
from lora_jax.ops.paged_attention._gpu_schedule import (
    AttentionConfig,
    AttentionSizes,
    find_config,
    make_schedule,
)

# (sequence, first position, tokens): decode, a chunk in the middle, one token, and one that sees
# the second chunk of positions.
MIXED = ((2, 30, 1), (1, 9, 5), (3, 0, 1), (4, 140, 1))
SHAPES = {
    "gqa": dataclasses.replace(MODELS["llama-8b"], q_heads=8, kv_heads=2, k_dim=64, v_dim=64),
    "window-and-sinks": dataclasses.replace(
        MODELS["gpt-oss-20b"], q_heads=8, kv_heads=1, sliding_window=70
    ),
    "latent": dataclasses.replace(MODELS["deepseek-v2-lite"], q_heads=16, k_dim=192, v_dim=128),
}
CUT = AttentionConfig(block=64, chunk=64, tokens=1, cut=True, stages=2, ctas=1)
WHOLE = AttentionConfig(block=64, chunk=64, tokens=2, cut=False, stages=3, ctas=1)


def as_numbers(array: jax.Array) -> np.ndarray:
    """Return bfloat16 as float32, which is exact."""
    return np.asarray(array.astype(jnp.float32))


def meaning(case: AttentionCase) -> np.ndarray:
    rest = (case.options["scale"], case.v_dim, case.sliding_window)
    of = jax.jit(attention_kernel(reference.paged_attention), static_argnums=(8, 9, 10))
    return as_numbers(of(*case.arrays, case.sinks, *rest))


@functools.cache
def interpreted_kernel(v_dim: int, sliding_window: int | None, scale: float, **options):
    """Return the op, compiled once for each shape: that takes longer than running it."""
    options |= {"v_dim": v_dim, "sliding_window": sliding_window, "scale": scale}
    call = jax.jit(functools.partial(attention_kernel(pallas_gpu.paged_attention), **options))
    return lambda *arrays: as_numbers(jax.block_until_ready(call(*arrays)))


def interpret(
    case: AttentionCase, config: AttentionConfig, params: plgpu.InterpretGPUParams
) -> np.ndarray:
    options = case.options
    sinks = options.pop("sinks")
    return interpreted_kernel(**options, config=config, interpret=params)(*case.arrays, sinks)


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


INTERPRETED = [
    ("gqa", CUT),
    pytest.param("gqa", WHOLE, marks=pytest.mark.long),
    pytest.param("window-and-sinks", WHOLE, marks=pytest.mark.long),
    pytest.param("window-and-sinks", CUT, marks=pytest.mark.long),
    pytest.param("latent", CUT, marks=pytest.mark.long),
]


def small_case(name: str) -> AttentionCase:
    """Return a case of the one size that is interpreted."""
    return attention_case(SHAPES[name], MIXED, page_size=16, dtype="bfloat16", padding=2)


@pytest.mark.parametrize(("name", "config"), INTERPRETED)
def test_interpreted_matches_the_reference(name: str, config: AttentionConfig):
    case = small_case(name)
    with interpreted() as params:
        got = interpret(case, config, params)
    np.testing.assert_allclose(got, meaning(case), **TOLERANCE["bfloat16"])
    assert not got[int(case.num_tokens) :].any()


@pytest.mark.long
def test_interpreted_tokens_have_the_same_bits_in_any_company():
    """In another order, among fewer tokens, by chunks or by neighbours through all chunks."""
    case = small_case("gqa")
    some = np.array([6, 2, 3, 0])
    with interpreted() as params:
        want = interpret(case, CUT, params)
        for config in (CUT, WHOLE):
            got = interpret(tokens_of(case, some), config, params)
            np.testing.assert_array_equal(got[: len(some)], want[some])


def test_items_are_chunks_of_a_token_or_neighbours_with_all_their_chunks():
    """Blocks of 64 positions, chunks of 128; the third token's window begins in block 1."""
    seq, position = jnp.array([4, 4, 4, 1, 0], "i4"), jnp.array([129, 130, 300, 5, 9], "i4")
    sizes = AttentionSizes(8, 2, 64, 64, 16, 24, 200, 1.0, latent=False)
    schedule = jax.jit(make_schedule, static_argnums=(3, 4))
    cut = AttentionConfig(block=64, chunk=128, tokens=1, cut=True, stages=2, ctas=1)
    found = schedule(seq, position, jnp.int32(4), sizes, cut)
    assert found.num_parts.tolist() == [2, 2, 3, 1, 0]
    assert found.num_items.tolist() == [8]
    assert found.items[:8].tolist() == [
        [0, 1, 4, 129, 0, 2, 0],
        [0, 1, 4, 129, 2, 3, 1],
        [1, 1, 4, 130, 0, 2, 0],
        [1, 1, 4, 130, 2, 3, 1],
        [2, 1, 4, 300, 1, 2, 0],
        [2, 1, 4, 300, 2, 4, 1],
        [2, 1, 4, 300, 4, 5, 2],
        [3, 1, 1, 5, 0, 1, 0],
    ]
    whole = dataclasses.replace(cut, cut=False, tokens=4)
    found = schedule(seq, position, jnp.int32(4), sizes, whole)
    assert found.num_items.tolist() == [4]
    # The last token is none: it has an item without blocks, which writes its zeros.
    assert found.items[:4, :6].tolist() == [
        [0, 2, 4, 129, 0, 3],
        [2, 1, 4, 300, 1, 5],
        [3, 1, 1, 5, 0, 1],
        [4, 1, 0, 9, 0, 0],
    ]


@pytest.mark.parametrize("q_heads", [8, 16, 32, 40, 64])
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_a_tile_of_queries_holds_every_group_of_heads(q_heads: int, kv_heads: int):
    sizes = AttentionSizes(q_heads, kv_heads, 64, 64, 16, 4, None, 1.0, latent=False)
    for head in range(kv_heads):
        low = head * sizes.group % 8
        assert low + sizes.group <= sizes.rows
    assert sizes.rows % 8 == 0


REAL = {
    "qwen3-30b-a3b": MODELS["qwen3-30b-a3b"],
    "llama-8b": MODELS["llama-8b"],
    "gpt-oss-20b": MODELS["gpt-oss-20b"],
    "deepseek-v2-lite": MODELS["deepseek-v2-lite"],
}


def model_sizes(shape: ModelShape, page_size: int, max_pages: int) -> AttentionSizes:
    widths = shape.q_heads, shape.kv_heads, shape.k_dim, shape.v_dim
    return AttentionSizes(*widths, page_size, max_pages, shape.sliding_window, 0.1, shape.latent)


@pytest.mark.parametrize("tokens", [1, 64, 255, 2048, 8192])
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_blocks_fit_the_shared_memory_and_parts_are_bounded(shape: ModelShape, tokens: int):
    for max_pages in (1, 128, 1 << 14):
        sizes = model_sizes(shape, 16, max_pages)
        config = find_config(tokens, sizes)
        assert config.stages >= 2
        assert config.chunk % config.block == 0
        assert not config.cut or tokens * sizes.max_chunks(config.chunk) <= 8192


def arguments(shape: ModelShape, tokens: int, page_size: int) -> tuple:
    """Return shapes of a real size's arguments."""
    bf16, i32, pages = jnp.bfloat16, jnp.int32, 64 * 2048 // page_size
    page = (pages, page_size, shape.kv_heads)
    shapes = [((tokens, shape.q_heads, shape.k_dim), bf16), ((*page, shape.k_dim), bf16)]
    shapes += [((*page, shape.v_dim), bf16), ((64, pages // 64), i32)]
    shapes += [((tokens,), i32), ((tokens,), i32), ((), i32), ((shape.q_heads,), jnp.float32)]
    q, k, v, *rest, sinks = (jax.ShapeDtypeStruct(*s) for s in shapes)
    return (q, k, None if shape.latent else v, *rest, sinks if shape.sinks else None)


# model, tokens, positions of a page; further models and sizes are compiled by `make test-aot`
LOWERED = {
    "decode, window and sinks": ("gpt-oss-20b", 64, 16),
    "prompt, latent": ("deepseek-v2-lite", 1024, 256),
}


@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda_at_real_sizes(name: str):
    """A decode step's chunks are put together by a second kernel, whose CTAs each have a head."""
    model, tokens, page_size = LOWERED[name]
    shape = MODELS[model]
    config = find_config(tokens, model_sizes(shape, page_size, 2048 // page_size))
    options = {"scale": 0.1, "v_dim": shape.v_dim, "sliding_window": shape.sliding_window}
    call = functools.partial(attention_kernel(pallas_gpu.paged_attention), **options)
    attend, *combine = launches(
        functools.partial(call, interpret=False), *arguments(shape, tokens, page_size)
    )
    assert (attend.name, attend.threads) == ("_attend_kernel", 256)
    assert attend.grid == (132 * config.ctas, 1, 1)
    assert config.ctas * (attend.shared_bytes + 1024) <= 227 * 1024
    assert "wgmma.mma_async" in attend.assembly
    assert config.cut == bool(combine) == (tokens == 64)
    for launch in combine:
        assert launch.name == "_combine_kernel"
        assert sorted(launch.grid) == sorted((tokens, shape.kv_heads, 1))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": jnp.float32}, "bfloat16, not float32"),
        ({"q_heads": 12}, "steps of 8, up to 16 of a kv head, not 12 of 2"),
        ({"q_heads": 40}, "up to 16 of a kv head, not 40 of 2"),
        ({"tokens": 0}, "at least one token, not 0"),
        ({"k_dim": 96}, "steps of 64 columns up to 576, not 96 and 64"),
        ({"page_size": 24}, "divide 64 or are divided by it, not 24"),
        ({"page_size": 4}, "steps of 8 positions"),
    ],
)
def test_declines_what_it_cannot_serve(change, why):
    sizes = {"dtype": jnp.bfloat16, "tokens": 2, "q_heads": 8, "k_dim": 64, "page_size": 16}
    s = sizes | change
    numbers = functools.partial(jnp.zeros, dtype=s["dtype"])
    ints = functools.partial(jnp.zeros, dtype="i4")
    pages = (3, s["page_size"], 2)
    with pytest.raises(NotImplementedError, match=why):
        attention_kernel(pallas_gpu.paged_attention)(
            numbers((s["tokens"], s["q_heads"], s["k_dim"])),
            numbers((*pages, s["k_dim"])),
            numbers((*pages, 64)),
            ints((1, 3)),
            ints(s["tokens"]),
            ints(s["tokens"]),
            jnp.int32(s["tokens"]),
            None,
            0.1,
            64,
            None,
            interpret=False,
        )


def test_declines_on_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    case = small_case("gqa")
    with pytest.raises(NotImplementedError, match="cannot run on cpu"):
        paged_attention(*case.arrays, **case.options, implementation="pallas_gpu")


# (sequence, first position, tokens): decode steps, and one with prompts among them.
DECODE = ((2, 130, 1), (1, 1900, 1), (3, 0, 1), (4, 700, 3), (0, 511, 1), (5, 512, 1))
PROMPTS = ((2, 130, 1), (1, 300, 41), (3, 0, 257), (4, 700, 1), (0, 1500, 1))


@functools.cache
def on_gpu(v_dim: int, sliding_window: int | None, scale: float):
    options = {"v_dim": v_dim, "sliding_window": sliding_window, "scale": scale}
    call = jax.jit(functools.partial(attention_kernel(pallas_gpu.paged_attention), **options))
    return lambda *arrays: as_numbers(call(*arrays))


def run_on_gpu(case: AttentionCase) -> np.ndarray:
    options = case.options
    sinks = options.pop("sinks")
    return on_gpu(**options)(*case.arrays, sinks)


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [DECODE, PROMPTS], ids=["decode", "prompts"])
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_on_a_gpu_matches_the_reference(shape: ModelShape, chunks):
    case = attention_case(shape, chunks, page_size=16, dtype="bfloat16", padding=3)
    got = run_on_gpu(case)
    np.testing.assert_allclose(got, meaning(case), **TOLERANCE["bfloat16"])
    assert not got[int(case.num_tokens) :].any()
    np.testing.assert_array_equal(run_on_gpu(case), got)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL.values(), ids=REAL)
def test_on_a_gpu_a_token_has_the_same_bits_in_any_company(shape: ModelShape):
    """In a step of prompts, in decode steps of any size and order, and alone."""
    case = attention_case(shape, PROMPTS, page_size=128, dtype="bfloat16")
    want = run_on_gpu(case)
    for some in (np.array([300]), np.arange(40, 50), np.random.default_rng(3).permutation(301)):
        names = ("q", "token_to_seq", "positions")
        few = dataclasses.replace(case, **{name: getattr(case, name)[some] for name in names})
        few = dataclasses.replace(few, num_tokens=jnp.int32(len(some)))
        np.testing.assert_array_equal(run_on_gpu(few), want[some])
