"""Absorbed latent attention against the expanded one, in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.drivers.model_driver import Driver, random_model

from lora_jax.adapters.slots import AdapterSlots
from lora_jax.batch import ForwardBatch
from lora_jax.config import ModelConfig, from_hf
from lora_jax.kv_cache import LayerCache
from lora_jax.nn import rope
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.mla import LATENT_NORM_EPS, LatentAttention, PerHead, head_rows, latent_kv_shape
from lora_jax.ops.kv_rows import CODED

LATENT_MODEL = {
    "model_type": "deepseek_v2",
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "q_lora_rank": None,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
HIDDEN, HEADS, NOPE, ROPE, V_DIM, LATENT = 16, 3, 5, 4, 7, 10
PAGES, PAGE_SIZE = 6, 4


def make_config(q_rank: int | None = None) -> ModelConfig:
    return from_hf(
        {
            "model_type": "deepseek_v2",
            "vocab_size": 20,
            "hidden_size": HIDDEN,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "intermediate_size": 8,
            "max_position_embeddings": 32,
            "rms_norm_eps": 1e-6,
            "q_lora_rank": q_rank,
            "kv_lora_rank": LATENT,
            "qk_nope_head_dim": NOPE,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": V_DIM,
        }
    )


def make_attention(config: ModelConfig) -> LatentAttention:
    """Random weights of order one, norms among them."""
    f32, rng = jnp.dtype(jnp.float32), np.random.default_rng(0)
    shapes = nnx.eval_shape(lambda: LatentAttention(config, 0, dtype=f32, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(shapes, graph=False)
    random = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape) * 0.5, p.dtype), state)
    return nnx.merge(graphdef, random)


def run(config: ModelConfig, x: np.ndarray, bucket: int) -> tuple[np.ndarray, LayerCache]:
    """Return the output for one sequence that starts at position 0, and the cache."""
    tokens = len(x)
    pad = (0, bucket - tokens)
    positions = np.pad(np.arange(tokens, dtype=np.int32), pad)
    table = np.array([[4, 1, 3]], np.int32)
    slots = table[0, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    outside = np.where(np.arange(bucket) < tokens, slots, PAGES * PAGE_SIZE).astype(np.int32)
    nothing = jnp.zeros((bucket,), jnp.int32)
    batch = ForwardBatch(
        tokens=nothing,
        positions=jnp.asarray(positions),
        token_to_seq=nothing,
        token_to_slot=nothing - 1,
        token_to_page_slot=jnp.asarray(outside),
        block_tables=jnp.asarray(table),
        num_tokens=jnp.asarray(tokens, jnp.int32),
    )
    shape = latent_kv_shape(config)
    lead = (PAGES, PAGE_SIZE, shape.num_kv_heads)
    cache = LayerCache(k=jnp.zeros((*lead, shape.k_dim)), v=jnp.zeros((*lead, shape.v_dim)))
    attention = make_attention(config)

    @jax.jit
    def step(x, batch, cache):
        rows = AdapterRouting(batch.num_tokens, batch.token_to_slot, None, (), 0)
        return attention(x, rope.cos_sin(config.rope, batch.positions), batch, cache, rows)

    out, cache = step(jnp.asarray(np.pad(x, (pad, (0, 0)))), batch, cache)
    return np.asarray(out), cache


def expanded(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """The same in float64, with K and V of every head and every position in full."""
    attention = make_attention(config)
    x = x.astype(np.float64)

    def weight(module) -> np.ndarray:
        return np.asarray(module.weight[...], np.float64)

    def norm(module, y: np.ndarray) -> np.ndarray:
        mean_square = np.mean(y * y, axis=-1, keepdims=True)
        return y / np.sqrt(mean_square + LATENT_NORM_EPS) * weight(module)

    def turn(y: np.ndarray) -> np.ndarray:
        """Multiply the pairs (2 i, 2 i + 1) of [tokens, heads, dim] as complex numbers."""
        pairs = y[..., ::2] + 1j * y[..., 1::2]
        speed = config.rope.theta ** (-np.arange(0, ROPE, 2) / ROPE)
        turned = pairs * np.exp(1j * np.arange(len(y))[:, None, None] * speed)
        return np.stack([turned.real, turned.imag], axis=-1).reshape(y.shape)

    if config.latent.q_lora_rank is None:
        q = x @ weight(attention.q_proj).T
    else:
        low = norm(attention.q_a_layernorm, x @ weight(attention.q_a_proj).T)
        q = low @ weight(attention.q_b_proj).T
    q = q.reshape(len(x), HEADS, NOPE + ROPE)
    latent, shared_key = np.split(x @ weight(attention.kv_a_proj_with_mqa).T, [LATENT], axis=-1)
    latent = norm(attention.kv_a_layernorm, latent)
    k_nope = np.einsum("hcn,sc->shn", weight(attention.absorb_k), latent)
    value = np.einsum("hvc,sc->shv", weight(attention.absorb_v), latent)
    k_rope = np.repeat(turn(shared_key[:, None]), HEADS, axis=1)
    q = np.concatenate([q[..., :NOPE], turn(q[..., NOPE:])], axis=-1)
    scores = np.einsum("thd,shd->hts", q, np.concatenate([k_nope, k_rope], axis=-1))
    scores = np.where(np.tri(len(x), dtype=bool), scores * (NOPE + ROPE) ** -0.5, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("hts,shv->thv", p / p.sum(axis=-1, keepdims=True), value)
    return out.reshape(len(x), -1) @ weight(attention.o_proj).T


@pytest.mark.parametrize("q_rank", [None, 6])
def test_absorbed_equals_expanded(q_rank):
    config = make_config(q_rank)
    x = np.random.default_rng(1).standard_normal((9, HIDDEN)).astype(np.float32)
    out, cache = run(config, x, bucket=16)
    np.testing.assert_allclose(out[:9], expanded(config, x), rtol=1e-4, atol=1e-5)
    assert cache.k.shape == (PAGES, PAGE_SIZE, 1, LATENT + ROPE)
    assert cache.v.size == 0
    wide, _ = run(config, x, bucket=32)
    np.testing.assert_array_equal(wide[:9], out[:9])


def test_head_rows_stand_together_and_padding_stands_last():
    rows = head_rows(4, HEADS, jnp.asarray(2, jnp.int32))
    np.testing.assert_array_equal(rows.group_sizes, [2] * HEADS)
    np.testing.assert_array_equal(rows.row_to_token[: 2 * HEADS], [0, 1] * HEADS)
    np.testing.assert_array_equal(rows.row_to_expert[: 2 * HEADS], np.repeat(np.arange(HEADS), 2))
    assert set(np.asarray(rows.row_to_token[2 * HEADS :]).tolist()) == {2, 3}


def test_per_head_map_with_a_matrix_shared_by_all_heads():
    """A per head and one B for all: stride 0, as LoRA on kv_b_proj's keys has it."""
    rank, tokens, real = 2, 4, 3
    rng = np.random.default_rng(2)
    a = rng.standard_normal((HEADS, rank, NOPE)).astype(np.float32)
    b = rng.standard_normal((rank, LATENT)).astype(np.float32)
    x = rng.standard_normal((tokens, HEADS, NOPE)).astype(np.float32)
    pools = {str(NOPE): jnp.asarray(a.reshape(-1, NOPE)), str(LATENT): jnp.asarray(b)}
    entries = jnp.asarray([0, 0, rank, rank, 0], jnp.int32).reshape(1, 1, 1, 5)
    slots = AdapterSlots(pools, entries, jnp.full((1, 1, 1), 0.5))
    of_token = AdapterRouting(
        jnp.asarray(real, jnp.int32), jnp.asarray([0, -1, 0, -1]), slots, ("m",), rank
    )
    by_head = head_rows(tokens, HEADS, of_token.num_rows)
    rows = of_token.gathered(by_head.row_to_token, of_token.num_rows * HEADS)
    layer = PerHead(
        HEADS, NOPE, LATENT, module="m", layer=0, dtype=jnp.dtype(jnp.float32), rngs=nnx.Rngs(0)
    )
    got = np.asarray(layer(jnp.asarray(x), by_head, rows))
    base = np.asarray(layer(jnp.asarray(x), by_head, dataclasses.replace(rows, adapters=None)))
    plain = np.einsum("hon,thn->tho", np.asarray(layer.weight[...]), x)
    delta = 0.5 * np.einsum("rc,hrn,thn->thc", b, a, x)
    np.testing.assert_allclose(got[[0, 2]], (plain + delta)[[0, 2]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(base[1], plain[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[1], base[1])
    np.testing.assert_array_equal(got[3], 0)


def test_latents_in_8_bits_are_near_and_the_same_in_any_chunks():
    model, config = random_model(LATENT_MODEL)
    driver, prompts = Driver(model, config), [[5, 9, 17, 3, 11, 8, 2], [7, 1, 4]]
    plain = driver.run(prompts)
    driver.dtype = CODED
    whole, chunked = driver.run(prompts), driver.run(prompts, chunk=2)
    for got, want, again in zip(whole, plain, chunked, strict=True):
        error = np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))
        assert 0 < error < 0.12  # weights at random make sharp attention
        np.testing.assert_array_equal(got, again)
