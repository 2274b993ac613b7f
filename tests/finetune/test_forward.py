"""The dense pass gives the served logits, for every kind of layer it does, and has a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax.batch import ForwardBatch
from lora_jax.config import from_hf
from lora_jax.finetune.forward import forward
from lora_jax.kv_cache import init_cache
from lora_jax.models import build

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
CONFIGS = {
    "llama": BASE | {"model_type": "llama", "tie_word_embeddings": True},
    "llama biases": BASE | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral window": BASE | {"model_type": "mistral", "sliding_window": 5},
    "qwen3": BASE | {"model_type": "qwen3", "head_dim": 16},
    "mixtral": BASE | {"model_type": "mixtral", "num_local_experts": 4},
    "qwen3_moe": BASE
    | EXPERTS
    | {"model_type": "qwen3_moe", "num_experts": 6, "norm_topk_prob": True, "head_dim": 8},
    "qwen3_moe mixed": BASE
    | EXPERTS
    | {"model_type": "qwen3_moe", "num_experts": 6, "mlp_only_layers": [1], "head_dim": 8},
}
LATENT = {
    "model_type": "deepseek_v2",
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 8,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
CONFIGS["deepseek_v2"] = BASE | EXPERTS | LATENT | {"q_lora_rank": None}
CONFIGS["deepseek_v2 low-rank q"] = BASE | EXPERTS | LATENT | {"q_lora_rank": 14}
LENGTH = 13


def random_model(name: str):
    """A float32 model whose every parameter is random, so that no bias or norm is trivial."""
    config = from_hf(CONFIGS[name])
    graphdef, state = nnx.split(build(config), graph=False)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [
        leaf + 0.3 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves)), config


def served_logits(model, config, tokens: np.ndarray) -> np.ndarray:
    """Logits of one sequence through pages, as the engine runs it."""
    page_size, length = 4, len(tokens)
    pages = -(-length // page_size)
    places = jnp.arange(length, dtype=jnp.int32)
    batch = ForwardBatch(
        tokens=jnp.asarray(tokens, jnp.int32),
        positions=places,
        token_to_seq=jnp.zeros(length, jnp.int32),
        token_to_slot=jnp.full(length, -1, jnp.int32),
        token_to_page_slot=places,
        block_tables=jnp.arange(pages, dtype=jnp.int32)[None],
        num_tokens=jnp.int32(length),
    )
    cache = init_cache(model.kv_shape(config), pages, page_size, jnp.dtype(jnp.float32))
    hidden, _ = model(batch, cache, None, 1)
    return np.asarray(model.logits(hidden, batch.num_tokens, batch.token_to_slot, None, 1))


def packed(rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of two segments and padding: tokens, positions, segments."""
    tokens = jax.random.randint(jax.random.key(2), (rows, 2 * LENGTH + 3), 0, 64, jnp.int32)
    one = np.concatenate([np.arange(LENGTH), np.arange(LENGTH), np.zeros(3)])
    segment = np.repeat([0, 1, -1], [LENGTH, LENGTH, 3])
    repeat = (rows, 1)
    return (
        tokens,
        jnp.tile(jnp.int32(one)[None], repeat),
        jnp.tile(jnp.int32(segment)[None], repeat),
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_each_segment_has_the_logits_it_is_served_with(name):
    model, config = random_model(name)
    tokens, positions, segments = packed(2)
    out = forward(model, tokens, positions, segments)
    for row, start in ((0, 0), (1, LENGTH)):
        want = served_logits(model, config, np.asarray(tokens[row, start : start + LENGTH]))
        got = np.asarray(out.logits[row, start : start + LENGTH])
        np.testing.assert_allclose(got, want, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_the_gradient_is_the_slope(name):
    model, _ = random_model(name)
    graphdef, state = nnx.split(model, graph=False)
    inputs = packed(1)

    @jax.jit
    def loss(state):
        return jnp.mean(jnp.square(forward(nnx.merge(graphdef, state), *inputs).logits))

    gradient = jax.jit(jax.grad(loss))(state)
    size = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient)))
    step = 1e-3 / float(size)

    def moved(sign: float) -> float:
        return float(loss(jax.tree.map(lambda p, g: p + sign * step * g, state, gradient)))

    slope = (moved(1.0) - moved(-1.0)) / (2 * step)
    np.testing.assert_allclose(slope, float(size) ** 2, rtol=2e-2)


def test_even_routing_has_imbalance_one():
    model, _ = random_model("mixtral")
    for layer in model.layers:
        layer.mlp.router.weight[...] = jnp.zeros_like(layer.mlp.router.weight[...])
    assert float(forward(model, *packed(1)).imbalance) == pytest.approx(1.0, abs=1e-5)


def test_dense_models_have_no_imbalance():
    assert float(forward(random_model("llama")[0], *packed(1)).imbalance) == 0.0


def test_a_layer_that_is_not_done_is_refused():
    model, _ = random_model("llama")
    model.layers[1].mlp = nnx.Module()
    with pytest.raises(ValueError, match="is not done"):
        forward(model, *packed(1))
