"""Model classes by model_type, and sizes of real models' catalogues."""

import json

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lora_jax.config import from_hf, known_model_types
from lora_jax.models import build, model_class
from lora_jax.models.llama import Llama
from lora_jax.models.registry import abstract


@pytest.mark.parametrize("model_type", known_model_types())
def test_every_config_that_reads_has_a_class(model_type):
    assert model_class(model_type).__module__.startswith("lora_jax.models.")


def test_unknown_model_type():
    with pytest.raises(ValueError, match="'gpt2' is not supported; supported are dbrx"):
        model_class("gpt2")


def test_build():
    config = from_hf(as_hub_config("llama", LLAMA_LIKE))
    model = build(config, jnp.bfloat16)
    assert isinstance(model, Llama)
    assert model.embed.weight.dtype == jnp.bfloat16


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_model_without_memory_has_the_shapes_of_a_drawn_one(model_type, monkeypatch):
    """It is made without draws, which take longer to trace than all else."""
    hub = as_hub_config(model_type, LLAMA_LIKE | {"expert_inter": 8, "experts": 4, "top_k": 2})
    config = from_hf(hub | {"num_local_experts": 4})
    drawn = nnx.eval_shape(
        lambda: model_class(model_type)(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
    monkeypatch.setattr(jax.random, "normal", None)
    graph, state = abstract(config, jnp.bfloat16)
    wanted_graph, wanted = nnx.split(drawn, graph=False)
    assert graph == wanted_graph
    assert jax.tree.leaves_with_path(state) == jax.tree.leaves_with_path(wanted)


LLAMA_LIKE = {"vocab": 32, "hidden": 16, "dense_inter": 24, "layers": 1, "heads": 2}
LLAMA_LIKE |= {"kv_heads": 1, "head_dim": 8, "max_pos": 64}


def as_hub_config(model_type: str, facts: dict) -> dict:
    """Return a config.json of the facts that models.json has about a model."""
    return {
        "model_type": model_type,
        "vocab_size": facts["vocab"],
        "hidden_size": facts["hidden"],
        "intermediate_size": facts.get("dense_inter") or facts["expert_inter"],
        "num_hidden_layers": facts["layers"],
        "num_attention_heads": facts["heads"],
        "num_key_value_heads": facts["kv_heads"],
        "head_dim": facts["head_dim"],
        "max_position_embeddings": facts["max_pos"],
        "rms_norm_eps": 1e-5,
        "num_experts": facts.get("experts"),
        "num_experts_per_tok": facts.get("top_k"),
        "moe_intermediate_size": facts.get("expert_inter"),
    }


REAL = {
    "Mixtral-8x7B-v0.1": "mixtral",
    "Qwen3-30B-A3B": "qwen3_moe",
    "Llama-2-7B": "llama",
    "Llama-2-70B": "llama",
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("experts.gate_proj", "experts.up_proj", "experts.down_proj")


@pytest.mark.parametrize("name", REAL)
def test_parameters_per_rank_of_real_models(real_data, name):
    """Oracle: LoRA sizes per unit of rank, worked out from the published configs."""
    facts = json.loads((real_data / "models.json").read_text())["models"][name]
    config = from_hf(as_hub_config(REAL[name], facts))
    catalogue = model_class(REAL[name]).catalogue(config)

    def per_rank(*modules: str) -> int:
        found = [catalogue.modules[module] for module in modules]
        return sum(len(m.layers) * max(1, m.num_experts) * (m.d_in + m.d_out) for m in found)

    want = facts["lora_params_per_rank"]
    assert per_rank("q_proj", "v_proj") == want["attn_qv"]
    assert per_rank(*ATTENTION) == want["attn_all"]
    if "experts_split" in want:
        assert per_rank(*EXPERTS) == want["experts_split"]
        both = "all_linear(attn+experts+shared+dense+router)"
        assert per_rank(*ATTENTION, *EXPERTS, "router") == want[both]
