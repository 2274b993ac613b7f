"""Calls of paged attention: which kernel serves which sizes, and the memory of parts."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from support.checks.handlers import assert_served
from support.drivers.lowering import CustomCall, custom_calls

from cuda_backend.paged_attention import check_support, cut_work, paged_attention
from lora_jax.ops.cases import MODELS, ModelShape
from lora_jax.ops.kv_rows import CODED
from lora_jax.ops.paged_attention import PagedAttentionArgs

TINY = dataclasses.replace(MODELS["llama-8b"], q_heads=6, kv_heads=2, k_dim=96, v_dim=96)


def args_of(
    model: ModelShape, tokens: int, dtype=jnp.bfloat16, coded: bool = False, page: int = 16
):
    """Return shapes of attention of `tokens` of 4 sequences of up to 128 pages."""
    shape, i32 = jax.ShapeDtypeStruct, jnp.int32
    items = [model.k_dim + 4, model.v_dim + 4] if coded else [model.k_dim, model.v_dim]
    pages = [shape((99, page, model.kv_heads, n), CODED if coded else dtype) for n in items]
    return PagedAttentionArgs(
        q=shape((tokens, model.q_heads, model.k_dim), dtype),
        k_pages=pages[0],
        v_pages=None if model.latent else pages[1],
        block_tables=shape((4, 128), i32),
        token_to_seq=shape((tokens,), i32),
        positions=shape((tokens,), i32),
        num_tokens=shape((), i32),
        sinks=shape((model.q_heads,), jnp.bfloat16) if model.sinks else None,
        scale=0.5,
        v_dim=model.v_dim,
        sliding_window=model.sliding_window,
    )


def calls_of(args: PagedAttentionArgs) -> tuple[CustomCall, CustomCall]:
    """Return the call that lists the work, and attention's; their handlers take them."""
    units, attention = custom_calls(paged_attention, args)
    assert units.target == "lora_jax_cuda_attention_units"
    for call in (units, attention):
        assert_served(call)
    assert attention.operands[6:] == units.results
    return units, attention


def test_a_decode_step_is_cut_into_chunks_of_256_positions(on_hopper):
    model = MODELS["qwen3-30b-a3b"]
    units, call = calls_of(args_of(model, 4))
    cut = cut_work(4, model.q_heads, model.kv_heads, 128, 128 * 16)
    assert (cut.chunk, cut.max_chunks, cut.part_rows) == (256, 8, 4)
    sizes = {"unit_tokens": cut.unit_tokens, "many_tokens": 0}
    assert units.attributes == sizes | {"chunk": 256, "window": 0}
    assert units.results == ("36x8xi32", "4x2xi32", "2xi32")
    assert call.target == "lora_jax_cuda_paged_attention"
    heads = f"4x{model.q_heads}"
    assert call.results == (f"{heads}x128xbf16", "4x8x32x128xf32", "4x8x32x2xf32")
    said = {"scale": 0.5, "chunk": 256, "window": 0}
    assert call.attributes == said | {"cta_heads": 4, "token_groups": 2, "many": 0}
    assert call.operands[5] == "0xf32"  # no sinks


def test_many_neighbours_of_a_prompt_are_a_case_of_their_own(on_hopper):
    units, call = calls_of(args_of(MODELS["qwen3-30b-a3b"], 512))
    assert (units.attributes["unit_tokens"], units.attributes["many_tokens"]) == (4, 16)
    assert (call.attributes["cta_heads"], call.attributes["many"]) == (4, 1)


def test_latents_are_read_once_for_k_and_v(on_hopper):
    model = MODELS["deepseek-v2-lite"]
    _, call = calls_of(args_of(model, 512))
    assert call.operands[1:3] == ("99x16x1x576xbf16", "0xbf16")
    assert call.results[0] == f"512x{model.q_heads}x512xbf16"
    assert (call.attributes["chunk"], call.attributes["token_groups"]) == (512, 2)


def test_sinks_and_a_window_reach_the_kernel(on_hopper):
    model = MODELS["gpt-oss-20b"]
    units, call = calls_of(args_of(model, 4))
    assert call.operands[5] == f"{model.q_heads}xf32"
    assert units.attributes["window"] == call.attributes["window"] == model.sliding_window


def test_pages_in_8_bits_have_a_kernel_of_their_own(on_hopper):
    model = MODELS["qwen3-30b-a3b"]
    _, call = calls_of(args_of(model, 4, coded=True))
    assert call.target == "lora_jax_cuda_coded_attention"
    assert call.operands[1] == f"99x16x{model.kv_heads}x132xui8"


@pytest.mark.parametrize(
    ("model", "tokens", "options", "rows"),
    [
        (TINY, 4, {}, 4),
        (TINY, 300, {}, 16),
        (MODELS["llama-8b"], 4, {"dtype": jnp.float32}, 4),
        (MODELS["llama-8b"], 4, {"page": 8}, 4),
    ],
    ids=["heads of 96", "prompt", "float32", "small pages"],
)
def test_other_sizes_go_without_tensor_cores(on_hopper, model, tokens, options, rows):
    args = args_of(model, tokens, **options)
    units, call = calls_of(args)
    assert call.target == "lora_jax_cuda_plain_attention"
    assert call.attributes["rows"] == rows
    heads = args.q.shape[1] // args.k_pages.shape[2]
    assert units.attributes["unit_tokens"] == max(1, rows // heads)


def test_declines_what_no_kernel_serves(on_hopper):
    with pytest.raises(NotImplementedError, match="heads of 96 and 96 columns, pages of 16 where"):
        calls_of(args_of(TINY, 4, coded=True))
    for sizes, why in (
        ((0, 64, 64), "1 to 8192 tokens, not 0"),
        ((1, 60, 64), "steps of 8 columns, up to 576 of K and 512 of V, not 60 and 64"),
        ((1, 576, 520), "not 576 and 520"),
    ):
        with pytest.raises(NotImplementedError, match=why):
            check_support(jnp.dtype(jnp.bfloat16), *sizes)
