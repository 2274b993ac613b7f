"""Norms, the choice of experts and the placing of heads on Hopper: right, in any company."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.likely_cases import LIKELY_CASES, likely_case

from cuda_backend import choose_experts, keep_likely, layer_norm, place_heads, rms_norm
from lora_jax.config import MoeConfig
from lora_jax.ops.choose_experts import xla as choice
from lora_jax.ops.keep_likely import xla as likely
from lora_jax.ops.place_heads import PlaceHeadsArgs
from lora_jax.ops.place_heads import xla as places
from lora_jax.ops.rms_norm import xla as norm

BF16 = jnp.bfloat16
MOE = MoeConfig(num_experts=128, top_k=8, intermediate_size=8, layers=(0,), topk_norm=1.0)


def normal(seed, *shape, dtype=BF16):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def check_norm(kernel, rows, size, added):
    x, addend, weight = normal(0, rows, size), normal(1, rows, size), normal(2, size)
    given = (x, addend if added else None, weight, 1e-6)
    total, got = kernel(*given)
    want_total, want = norm.add_rms_norm(*given)
    np.testing.assert_array_equal(total, want_total)
    np.testing.assert_allclose(got.astype("f4"), want.astype("f4"), rtol=8e-3, atol=1e-6)
    alone = kernel(x[1:2], addend[1:2] if added else None, weight, 1e-6)
    for mine, its in zip(alone, (total, got), strict=True):
        np.testing.assert_array_equal(mine[0], its[1])


SIZES = [(64, 2048), (5, 64), (9, 512), (3, 1032), (700, 2880), (2, 8192)]


@pytest.mark.gpu
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_norms_are_the_composed_ones(rows, size, added):
    check_norm(jax.jit(rms_norm.rms_norm, static_argnums=3), rows, size, added)


CHOICES = {
    "qwen3": {},
    "mixtral": {"num_experts": 8, "top_k": 2, "softmax_first": False, "topk_norm": None},
    "deepseek": {"num_experts": 64, "top_k": 6, "topk_norm": None, "weight_scale": 2.5},
    "many": {"num_experts": 500, "top_k": 32},
}


@pytest.mark.gpu
@pytest.mark.parametrize("changes", CHOICES.values(), ids=CHOICES)
def test_experts_are_the_composed_choice(changes):
    config = dataclasses.replace(MOE, **changes)
    logits = jnp.round(normal(3, 33, config.num_experts, dtype=jnp.float32) * 4, 1)  # with ties
    choose = jax.jit(choose_experts.choose_experts, static_argnums=1)
    weights, ids = choose(logits, config)
    want_weights, want_ids = choice.choose_experts(logits, config)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-6)
    for mine, its in zip(choose(logits[7:8], config), (weights, ids), strict=True):
        np.testing.assert_array_equal(mine[0], its[7])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*LIKELY_CASES, "151936 tokens"])
def test_likely_tokens_are_the_composed_ones(name):
    case = LIKELY_CASES[name] if name in LIKELY_CASES else likely_case(151936, 4)
    keep = jax.jit(keep_likely.keep_likely)
    got = keep(*case)
    np.testing.assert_array_equal(got, jax.jit(likely.keep_likely)(*case))
    np.testing.assert_array_equal(keep(*(part[1:2] for part in case))[0], got[1])


def head_case(tokens, q_heads, kv_heads, dim, normed, page_slots):
    q, k, v = (normal(i, tokens, heads, dim) for i, heads in enumerate([q_heads, *[kv_heads] * 2]))
    scales = (normal(3, dim), normal(4, dim)) if normed else None
    angles = normal(5, tokens, dim // 2, dtype=jnp.float32) * 9
    pages = [normal(6 + i, 5, 16, kv_heads, dim) for i in range(2)]
    slots = jnp.asarray(page_slots, jnp.int32)
    return PlaceHeadsArgs(q, k, v, jnp.cos(angles), jnp.sin(angles), scales, *pages, slots, 1e-6)


HEADS = [(3, 32, 4, 128, True), (3, 6, 2, 64, False), (3, 2, 1, 256, True)]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", HEADS)
def test_heads_are_placed_as_the_composed_ones(shape):
    case = head_case(*shape, [17, 3, 80])  # the last is past the end
    place = jax.jit(place_heads.place_heads)
    got, want = place(case), places.place_heads(case)
    for mine, its in zip(got, want, strict=True):
        np.testing.assert_allclose(mine.astype("f4"), its.astype("f4"), rtol=8e-3, atol=2e-2)
    by_token = ("q", "k", "v", "cos", "sin", "token_to_page_slot")
    row = {name: getattr(case, name)[1:2] for name in by_token}
    alone = place(dataclasses.replace(case, **row))
    np.testing.assert_array_equal(alone[0][0], got[0][1])
    np.testing.assert_array_equal(alone[1][0, 3], got[1][0, 3])


@pytest.mark.parametrize(
    ("check", "why"),
    [
        (lambda: layer_norm.check_norm(jnp.dtype("float32"), 64), "bfloat16, not float32"),
        (lambda: layer_norm.check_norm(jnp.dtype(BF16), 4608), "steps of 8 up to 2048, not 4608"),
        (lambda: rms_norm.check_norm(jnp.dtype("float32"), 64), "bfloat16, not float32"),
        (lambda: rms_norm.check_norm(jnp.dtype(BF16), 60), "steps of 8 up to 8192, not 60"),
        (lambda: rms_norm.check_norm(jnp.dtype(BF16), 16384), "not 16384"),
        (
            lambda: choose_experts.check_choice(dataclasses.replace(MOE, num_experts=1024)),
            "a token, not 1024, 8",
        ),
        (lambda: choose_experts.check_choice(dataclasses.replace(MOE, topk_norm=2.0)), "norm 2.0"),
        (lambda: choose_experts.check_choice(dataclasses.replace(MOE, num_groups=8)), "8 groups"),
        (lambda: place_heads.check_heads(*[jnp.dtype("float32")] * 2, 64), "bfloat16, not float32"),
        (lambda: place_heads.check_heads(*[jnp.dtype(BF16)] * 2, 96), "not 96"),
    ],
)
def test_declines_what_it_cannot_serve(check, why):
    with pytest.raises(NotImplementedError, match=why):
        check()
