"""LoRA on latent attention adds what merging it into the weights adds; other kinds are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.drivers.model_driver import merged, random_model, random_sites

from lora_jax.config import from_hf
from lora_jax.finetune.attention import attend, softmax
from lora_jax.finetune.lora_params import LoraDelta, Site
from lora_jax.nn import rope

CONFIG = {
    "model_type": "deepseek_v2",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "kv_lora_rank": 12,
    "q_lora_rank": 14,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 8,
}


X = np.random.default_rng(0).standard_normal((10, 32)).astype(np.float32)
POSITIONS = np.tile(np.arange(5, dtype=np.int32), 2)
VISIBLE = np.tile(np.tri(5, dtype=bool), (2, 1, 1))


def attended(model, lora: LoraDelta | None) -> np.ndarray:
    graphdef, state = nnx.split(model, graph=False)

    @jax.jit  # operator by operator takes seconds to compile
    def attention(state, lora):
        layer = nnx.merge(graphdef, state).layers[0]
        angles = rope.cos_sin(model.config.rope, jnp.asarray(POSITIONS))
        return attend(layer.attn, jnp.asarray(X), angles, jnp.asarray(VISIBLE), lora)

    return np.asarray(attention(state, lora))


def test_lora_of_every_map_of_latent_attention_equals_merged_weights():
    model, config = random_model(CONFIG)
    catalogue = model.catalogue(config)
    names = [n for n in catalogue.module_names if n.startswith(("q_", "kv_", "o_"))]
    assert len(names) == 6
    sites = random_sites(catalogue, 3, names)
    delta = {k: Site(jnp.asarray(a), jnp.asarray(b), s) for k, (a, b, s) in sites.items()}
    want = attended(merged(model, sites), None)
    np.testing.assert_allclose(attended(model, LoraDelta(delta)), want, atol=1e-4)
    assert np.abs(want - attended(model, None)).max() > 0.1


def test_another_kind_of_attention_is_refused():
    class Strange:
        def __call__(self, x, angles, batch, cache, rows):
            return x, cache

    angles = rope.cos_sin(from_hf(CONFIG).rope, jnp.asarray(POSITIONS))
    with pytest.raises(ValueError, match="training does not support Strange"):
        attend(Strange(), jnp.asarray(X), angles, jnp.asarray(VISIBLE), None)


def test_a_sink_takes_its_share_of_every_place():
    logits = np.random.default_rng(0).normal(size=(1, 2, 1, 3, 3)).astype(np.float32)
    sinks = np.array([[0.5], [-1.0]], np.float32)
    powers = np.exp(logits)
    want = powers / (powers.sum(-1, keepdims=True) + np.exp(sinks)[None, :, :, None, None])
    got = softmax(jnp.asarray(logits), jnp.asarray(sinks))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    plain = softmax(jnp.asarray(logits), None)
    np.testing.assert_allclose(plain, powers / powers.sum(-1, keepdims=True), rtol=1e-5)
