"""Trained LoRA parameters add what merging B A by hand adds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.cases.finetune_cases import dense, random_pairs
from support.drivers.model_driver import random_model

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, SiteWeights
from lora_jax.finetune.lora_params import (
    FUSED,
    GATE,
    UP,
    LoraSpec,
    init_lora,
    loaded_delta,
    trained_delta,
)

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
}
ALL = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("experts.gate_proj", "experts.up_proj", "experts.down_proj", "router", "lm_head"),
)
TOKENS = np.random.default_rng(3).integers(0, 64, (2, 11), dtype=np.int32)
PLACES = np.tile(np.arange(11, dtype=np.int32), (2, 1))
INPUTS = tuple(jnp.asarray(x) for x in (TOKENS, PLACES, np.zeros_like(PLACES)))
REPORT = AdapterReport(AdapterKind.LORA, "here", "0", {}, 0, 0, {}, 2, 2, None, None)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)[0]


def weight_of(model, module: str, layer: int) -> nnx.Param:
    """The parameter that a site adds to."""
    if module == "lm_head":
        return model.lm_head.weight
    block = model.layers[layer]
    if module == "router":
        return block.mlp.router.weight
    if module.startswith("experts."):
        return getattr(block.mlp.experts, module.removeprefix("experts."))
    owner = block.mlp if hasattr(block.mlp, module) else block.attn
    return getattr(owner, module).weight


def merged(model, delta):
    """The model with W + scaling * B A, multiplied out in float32 by hand."""
    graphdef, state = nnx.split(model, graph=False)
    copy = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf, state))  # parameters of its own
    for (module, layer), site in delta.sites.items():
        param = weight_of(copy, module, layer)
        product = np.einsum("ero,eri->eoi", np.asarray(site.b), np.asarray(site.a)) * site.scaling
        param[...] = jnp.asarray(np.asarray(param[...]) + product.reshape(param[...].shape))
    return copy


def logits(model, delta=None):
    return dense(model, INPUTS, delta).logits


@pytest.mark.long
@pytest.mark.parametrize(
    ("modules", "fused"),
    [
        (ALL, True),
        (ALL, False),
        (("q_proj",), True),
        (("experts.down_proj",), False),
        (("lm_head",), True),
    ],
)
def test_the_delta_is_the_merged_model(model, modules, fused):
    spec = LoraSpec(3, 6.0, modules, use_rslora=fused, fused_experts=fused)
    catalogue = model.catalogue(model.config)
    delta = trained_delta(random_pairs(spec, catalogue), spec, catalogue)
    got = logits(model, delta)
    want = logits(merged(model, delta))
    base = logits(model)
    effect = float(jnp.abs(want - base).max())
    assert effect > 0.01
    np.testing.assert_allclose(got, want, atol=1e-4 * max(effect, 1.0))


def test_an_untrained_adapter_adds_nothing(model):
    catalogue = model.catalogue(model.config)
    spec = LoraSpec(3, 6.0, ALL)
    delta = trained_delta(init_lora(spec, catalogue, 0), spec, catalogue)
    np.testing.assert_array_equal(logits(model, delta), logits(model))


def test_fused_gate_and_up_share_their_a(model):
    catalogue = model.catalogue(model.config)
    pairs = random_pairs(spec := LoraSpec(3, 6.0, (GATE, UP)), catalogue)
    assert list(pairs) == [FUSED]
    assert pairs[FUSED].b.shape == (2, 4, 3, 40)
    delta = trained_delta(pairs, spec, catalogue)
    assert set(delta.sites) == {(GATE, 0), (UP, 0), (GATE, 2), (UP, 2)}
    np.testing.assert_array_equal(delta.sites[GATE, 2].a, delta.sites[UP, 2].a)


@pytest.mark.long
def test_a_matrix_that_all_experts_share_counts_for_each(model):
    rng = np.random.default_rng(0)
    a = rng.standard_normal((1, 2, 32)).astype(np.float32)
    b = rng.standard_normal((4, 2, 20)).astype(np.float32)

    def adapted(a, b):
        site = SiteWeights(a=a, b=b, scaling=0.5)
        return logits(model, loaded_delta(AdapterWeights({(GATE, 0): site}, report=REPORT)))

    one, each = adapted(a, b), adapted(np.tile(a, (4, 1, 1)), b)
    assert float(jnp.abs(one - logits(model)).max()) > 0.01
    np.testing.assert_allclose(one, each, atol=1e-5)


def test_scaling_follows_rank():
    assert LoraSpec(16, 32.0, ("q_proj",)).scaling == 2.0
    assert LoraSpec(16, 32.0, ("q_proj",), use_rslora=True).scaling == 8.0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (lambda: LoraSpec(0, 1.0, ("q_proj",)), "rank 0"),
        (lambda: LoraSpec(4, -1.0, ("q_proj",)), "alpha -1"),
        (lambda: LoraSpec(4, 1.0, (GATE,)), "need both"),
    ],
)
def test_a_senseless_spec_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        spec()


def test_a_module_the_base_has_not_is_named(model):
    with pytest.raises(ValueError, match="z_proj"):
        init_lora(LoraSpec(4, 8.0, ("z_proj",)), model.catalogue(model.config), 0)
