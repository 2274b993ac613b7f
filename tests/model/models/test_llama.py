"""Llama and its dense relatives against transformers."""

import numpy as np
import pytest
import transformers
from support.contracts.model_contract import PROMPT, Case, ModelContract, make_case, shaken
from support.drivers.model_driver import (
    TINY,
    TOLERANCE,
    WIDTH,
    Driver,
    old_keys,
    oracle_logits,
    save_oracle,
)

from lora_jax.models import load

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make_llama(**changes) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(**{**TINY, "intermediate_size": WIDTH, **changes})
    transformers.set_seed(0)
    return shaken(transformers.LlamaForCausalLM(config)).eval()


def bare_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As a base model saved without its head class, plus what old releases stored."""
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    renamed["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    return renamed


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    tmp = tmp_path_factory.mktemp("llama")
    return make_case(tmp, make_llama(rope_parameters=LLAMA3), bare_names, old_keys)


class TestLlama(ModelContract):
    """Grouped queries, llama3 frequencies, an untied head."""


RELATIVES = {
    "tied": lambda: make_llama(tie_word_embeddings=True),
    "biases": lambda: make_llama(attention_bias=True, mlp_bias=True, head_dim=12),
    "linear_rope": lambda: make_llama(
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "yarn": lambda: make_llama(
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
        }
    ),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**TINY, intermediate_size=WIDTH, sliding_window=5)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**TINY, intermediate_size=WIDTH)
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**TINY, intermediate_size=WIDTH, head_dim=12)
    ),
}


# What these change has a test of its own, of the loader.
NEAR = ("tied",)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in NEAR else ()) for n in RELATIVES]
)
def test_relatives_match_transformers(name: str, tmp_path):
    oracle = shaken(RELATIVES[name]()).eval()
    model, config = load(save_oracle(oracle, tmp_path))
    got = Driver(model, config).run([PROMPT], chunk=8)[0]
    np.testing.assert_allclose(got, oracle_logits(oracle, PROMPT), atol=TOLERANCE, rtol=0)
