"""The dense pass gives the served logits, for every kind of layer it does, and has a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.cases.finetune_cases import dense
from support.drivers.model_driver import Driver, random_model

from lora_jax.finetune.forward import forward

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


def packed(rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of two segments and padding: tokens, positions, segments."""
    tokens = np.random.default_rng(2).integers(0, 64, (rows, 2 * LENGTH + 3))
    one = np.concatenate([np.arange(LENGTH), np.arange(LENGTH), np.zeros(3)])
    segment = np.repeat([0, 1, -1], [LENGTH, LENGTH, 3])
    columns = (tokens, np.tile(one, (rows, 1)), np.tile(segment, (rows, 1)))
    return tuple(jnp.asarray(column, jnp.int32) for column in columns)


# Each of the others has what these two have, and more.
# Parts of the others, or relatives of them.
PARTS = ("llama", "qwen3", "mixtral", "mistral window", "llama biases", "qwen3_moe", "deepseek_v2")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in PARTS else ()) for n in CONFIGS]
)
def test_each_segment_has_the_logits_it_is_served_with(name):
    model, config = random_model(CONFIGS[name])
    inputs = packed(2)
    logits = np.asarray(dense(model, inputs).logits)
    places = [(row, slice(start, start + LENGTH)) for row in (0, 1) for start in (0, LENGTH)]
    served = Driver(model, config).run([inputs[0][place].tolist() for place in places])
    for place, want in zip(places, served, strict=True):
        np.testing.assert_allclose(logits[place], want, atol=2e-4 * np.abs(want).max())


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.long), "qwen3_moe"])
def test_the_gradient_is_the_slope(name):
    model, _ = random_model(CONFIGS[name])
    graphdef, state = nnx.split(model, graph=False)
    inputs = packed(1)

    @jax.jit
    @jax.value_and_grad
    def loss(state):
        return jnp.mean(jnp.square(forward(nnx.merge(graphdef, state), *inputs).logits))

    gradient = loss(state)[1]
    size = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient)))
    step = 1e-3 / float(size)

    def moved(sign: float) -> float:
        return float(loss(jax.tree.map(lambda p, g: p + sign * step * g, state, gradient))[0])

    slope = (moved(1.0) - moved(-1.0)) / (2 * step)
    np.testing.assert_allclose(slope, float(size) ** 2, rtol=2e-2)


@pytest.mark.long
def test_even_routing_has_imbalance_one():
    model, _ = random_model(CONFIGS["mixtral"])
    for layer in model.layers:
        layer.mlp.router.weight[...] = jnp.zeros_like(layer.mlp.router.weight[...])
    assert float(dense(model, packed(1)).imbalance) == pytest.approx(1.0, abs=1e-5)


def test_dense_models_have_no_imbalance():
    assert float(dense(random_model(CONFIGS["llama"])[0], packed(1)).imbalance) == 0.0


def test_a_layer_that_is_not_done_is_refused():
    model, _ = random_model(CONFIGS["llama"])
    model.layers[1].mlp = nnx.Module()
    with pytest.raises(ValueError, match="training does not support Module"):
        forward(model, *packed(1))
