"""Attention over pages against dense softmax attention in numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax.batch import ForwardBatch
from lora_jax.config import ModelConfig, from_hf
from lora_jax.kv_cache import LayerCache
from lora_jax.nn.attention import Attention
from lora_jax.nn.lora import AdapterRouting
from lora_jax.nn.rope import cos_sin

CONFIG = from_hf(
    {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 24,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
)
LENGTH, PAGE = 7, 4
F32 = jnp.dtype(jnp.float32)
KINDS = {
    "plain": {},
    "window": {"sliding_windows": (3,)},
    "clip": {"clip_qkv": 0.05},
    "head norms": {"qk_norm": True},
    "biases": {"qkv_bias": True, "o_bias": True},
    "sinks": {"sinks": True},
}


def make_attention(changes: dict) -> tuple[Attention, ModelConfig]:
    """Return attention whose biases, norms and sinks are random, too."""
    changes = dict(changes)
    sinks = changes.pop("sinks", False)
    config = dataclasses.replace(CONFIG, **changes)
    attention = Attention(config, 0, sinks=sinks, dtype=F32, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(attention, graph=False)
    rng = np.random.default_rng(1)
    noise = jax.tree.map(lambda p: p + 0.3 * rng.standard_normal(p.shape).astype("f4"), state)
    return nnx.merge(graphdef, noise), config


def dense(attention: Attention, config: ModelConfig, x: np.ndarray) -> np.ndarray:
    """Return the attention's output over one whole sequence, in float64."""

    def value(param) -> np.ndarray:
        return np.asarray(param[...], float)

    def project(linear, norm=None) -> np.ndarray:
        y = x @ value(linear.weight).T + (0 if linear.bias is None else value(linear.bias))
        if config.clip_qkv is not None:
            y = np.clip(y, -config.clip_qkv, config.clip_qkv)
        heads = y.reshape(len(x), -1, 8)
        if norm is not None:
            heads = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-5) * value(norm.weight)
        return heads

    def turn(heads: np.ndarray) -> np.ndarray:
        cos, sin = (np.asarray(a)[:, None] for a in cos_sin(config.rope, jnp.arange(len(x))))
        a, b = np.split(heads, 2, -1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = (
        turn(project(attention.q_proj, attention.q_norm)),
        project(attention.k_proj, attention.k_norm),
    )
    k, v = (np.repeat(h, 3, axis=1) for h in (turn(k), project(attention.v_proj)))
    logits = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(8)
    behind = np.arange(len(x))[:, None] - np.arange(len(x))[None]
    window = config.sliding_windows[0] or len(x)
    logits = np.where((behind >= 0) & (behind < window), logits, -np.inf)
    if attention.sinks is not None:
        sinks = np.broadcast_to(value(attention.sinks)[:, None, None], (6, len(x), 1))
        logits = np.concatenate([logits, sinks], -1)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True))[..., : len(x)]
    out = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
    return out @ value(attention.o_proj.weight).T + (
        0 if attention.o_proj.bias is None else value(attention.o_proj.bias)
    )


def make_batch(padding: int) -> ForwardBatch:
    """One sequence on pages 3 and 1, and padding tokens that point outside the cache."""
    positions = np.arange(LENGTH)
    pages = np.array([3, 1])
    places = pages[positions // PAGE] * PAGE + positions % PAGE

    def column(values, padded):
        return jnp.asarray([*values, *[padded] * padding], jnp.int32)

    return ForwardBatch(
        tokens=column(positions, 0),
        positions=column(positions, 0),
        token_to_seq=column([0] * LENGTH, 0),
        token_to_slot=column([-1] * LENGTH, -1),
        token_to_page_slot=column(places, 4 * PAGE),
        block_tables=jnp.asarray(pages[None], jnp.int32),
        num_tokens=jnp.int32(LENGTH),
    )


@pytest.mark.parametrize("name", KINDS)
def test_against_dense_attention(name):
    attention, config = make_attention(KINDS[name])
    x = np.random.default_rng(0).standard_normal((LENGTH + 2, 24)).astype(np.float32)
    batch = make_batch(padding=2)
    rows = AdapterRouting(
        batch.num_tokens, batch.token_to_slot, adapters=None, module_names=(), max_rank=0
    )
    marked = LayerCache(*(jnp.full((4, PAGE, 2, 8), 77.0) for _ in range(2)))
    turns = cos_sin(config.rope, batch.positions)
    run = jax.jit(lambda x, cache: attention(x, turns, batch, cache, rows))
    out, cache = run(jnp.asarray(x), marked)
    want = dense(attention, config, x[:LENGTH].astype(float))
    np.testing.assert_allclose(out[:LENGTH], want, atol=2e-5)
    written = np.asarray(cache.k)[[3, 1]].reshape(8, -1)
    assert (written[:LENGTH] != 77).all()
    for pages in (cache.k, cache.v):  # nothing else was written, by padding least of all
        assert (np.asarray(pages)[[0, 2]] == 77).all()
        assert (np.asarray(pages)[1, 3] == 77).all()
