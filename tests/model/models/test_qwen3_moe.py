"""Qwen3-MoE against transformers."""

from typing import Any

import numpy as np
import pytest
import transformers
from support.contracts.model_contract import PROMPT, Case, ModelContract, make_case, shaken
from support.drivers.model_driver import (
    TINY,
    TOLERANCE,
    WIDTH,
    Driver,
    fuse_experts,
    old_keys,
    oracle_logits,
    save_oracle,
)

from lora_jax.models import load


def make_qwen3_moe(**changes: Any) -> transformers.Qwen3MoeForCausalLM:
    """Three layers, the second of which is dense."""
    sizes = {
        "num_hidden_layers": 3,
        "head_dim": 12,
        "intermediate_size": 40,
        "moe_intermediate_size": WIDTH,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "mlp_only_layers": [1],
    }
    transformers.set_seed(0)
    config = transformers.Qwen3MoeConfig(**{**TINY, **sizes, **changes})
    return shaken(transformers.Qwen3MoeForCausalLM(config))


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    parts = ("gate_proj", "up_proj", "down_proj")
    return fuse_experts(tensors, parts, "model.layers.{layer}.mlp.experts")


def hub_config(config: dict[str, Any]) -> dict[str, Any]:
    config["num_experts"] = config.pop("num_local_experts")
    return old_keys(config)


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    tmp = tmp_path_factory.mktemp("qwen3_moe")
    oracle = make_qwen3_moe(norm_topk_prob=True, tie_word_embeddings=False)
    return make_case(tmp, oracle, fused, hub_config)


class TestQwen3Moe(ModelContract):
    """Head norms, renormalised weights, a dense layer between sparse ones."""


def test_weights_that_are_not_renormalised(tmp_path):
    oracle = make_qwen3_moe(norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[]).eval()
    model, config = load(save_oracle(oracle, tmp_path))
    assert config.experts.topk_norm is None
    assert config.experts.layers == (1,)
    got = Driver(model, config).run([PROMPT])[0]
    np.testing.assert_allclose(got, oracle_logits(oracle, PROMPT), atol=TOLERANCE, rtol=0)
