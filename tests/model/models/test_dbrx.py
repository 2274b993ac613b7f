"""DBRX against transformers."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from support.contracts.model_contract import OTHERS, PROMPT, Case, ModelContract, make_case, shaken
from support.drivers.model_driver import TOLERANCE, fill_slots, oracle_logits
from support.oracles.merged_oracle import named_lora, num_weights, weight_by_path
from transformers.models.dbrx.modeling_dbrx import DbrxFFN

from lora_jax.config import MoeConfig, from_hf
from lora_jax.ops.choose_experts import choose_experts

HIDDEN, WIDTH, EXPERTS, CLIP, THETA = 32, 24, 5, 1.5, 3000.0


def make_dbrx() -> transformers.DbrxForCausalLM:
    """Two layers; the clip is hit by every fifth or so value of q, k and v."""
    transformers.set_seed(0)
    config = transformers.DbrxConfig(
        vocab_size=64,
        d_model=HIDDEN,
        n_heads=4,
        n_layers=2,
        max_seq_len=64,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attn_config={"kv_n_heads": 2, "clip_qkv": CLIP, "rope_theta": THETA},
        ffn_config={
            "ffn_hidden_size": WIDTH,
            "moe_num_experts": EXPERTS,
            "moe_top_k": 3,
            "hidden_size": HIDDEN,
        },
    )
    return shaken(transformers.DbrxForCausalLM(config))


def hub_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the released model: everything but sizes in attn_config and ffn_config."""
    ffn = config["ffn_config"]
    return {
        "architectures": ["DbrxForCausalLM"],
        "attn_config": {"clip_qkv": CLIP, "kv_n_heads": 2, "model_type": "", "rope_theta": THETA},
        "ffn_config": {
            "ffn_hidden_size": ffn["ffn_hidden_size"],
            "model_type": "",
            "moe_jitter_eps": 0.01,
            "moe_loss_weight": 0.05,
            "moe_num_experts": ffn["moe_num_experts"],
            "moe_top_k": ffn["moe_top_k"],
        },
        **{key: config[key] for key in ("d_model", "n_heads", "n_layers", "max_seq_len")},
        "model_type": "dbrx",
        "tie_word_embeddings": False,
        "torch_dtype": config["dtype"],
        "vocab_size": config["vocab_size"],
    }


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    return make_case(tmp_path_factory.mktemp("dbrx"), make_dbrx(), dict, hub_config)


class TestDbrx(ModelContract):
    """Layer norms, a clip that bites, three of five experts with weights that add up to 1."""


def test_clip_bites(case: Case):
    """The weights are such that a model without the clip gives other logits."""
    want = oracle_logits(case.oracle, PROMPT)
    for block in case.oracle.transformer.blocks:
        block.norm_attn_norm.attn.clip_qkv = 1e9
    unclipped = oracle_logits(case.oracle, PROMPT)
    for block in case.oracle.transformer.blocks:
        block.norm_attn_norm.attn.clip_qkv = CLIP
    assert np.abs(unclipped - want).max() > 1000 * TOLERANCE


def lora_shapes() -> dict[str, tuple[int, int]]:
    """(d_out, d_in) of every linear map of both layers, by the names that adapter files use."""
    shapes = {"lm_head": (64, HIDDEN)}
    for layer in range(2):
        at = f"transformer.blocks.{layer}"
        shapes[f"{at}.norm_attn_norm.attn.Wqkv"] = (64, HIDDEN)
        shapes[f"{at}.norm_attn_norm.attn.out_proj"] = (HIDDEN, HIDDEN)
        shapes[f"{at}.ffn.router.layer"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            shapes |= {f"{at}.ffn.experts.{expert}.{w}": (WIDTH, HIDDEN) for w in ("w1", "v1")}
            shapes[f"{at}.ffn.experts.{expert}.w2"] = (HIDDEN, WIDTH)
    return shapes


def weight_of(model: Any, path: str) -> torch.Tensor:
    """Return the view [d_out, d_in] of a parameter; w2 is stored the other way round."""
    found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)", path)
    if found is None:
        return weight_by_path(model, path)
    stack = getattr(model.get_submodule(f"{found[1]}.mlp"), found[3])
    matrix = stack.view(EXPERTS, WIDTH, HIDDEN)[int(found[2])]
    return matrix.T if found[3] == "w2" else matrix


def test_adapter_file_equals_merged_oracle(case: Case, tmp_path):
    """Names of files, Wqkv's split and our naming of experts, in a batch with the base."""
    catalogue = case.model.catalogue(case.config)
    lora = named_lora(lora_shapes())
    table = fill_slots(catalogue, [lora.read_back(tmp_path / "adapter", catalogue)])
    prompts, slots = [PROMPT, OTHERS[0]], [0, -1]
    got = case.driver.run(prompts, slots=slots, adapters=table, max_rank=lora.rank)
    want = oracle_logits(lora.merged_into(case.oracle, weight_of), PROMPT)
    np.testing.assert_allclose(got[0], want, atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(got[1], case.driver.run([OTHERS[0]])[0])


@pytest.mark.parametrize("order", [1.0, 2.0, None])
def test_router_norm_of_any_order(order):
    """moe_normalize_expert_weights is the order of the norm, or null for none."""
    config = make_dbrx().config
    config.ffn_config.moe_normalize_expert_weights = order
    logits = np.random.default_rng(1).standard_normal((7, EXPERTS)).astype(np.float32)
    want, want_ids = DbrxFFN(config).route_tokens_to_experts(torch.from_numpy(logits))
    moe: MoeConfig = from_hf(config.to_dict() | {"dtype": "float32"}).experts
    assert moe.topk_norm == order
    weights, ids = choose_experts(jnp.asarray(logits), moe)
    np.testing.assert_array_equal(ids, want_ids.numpy())
    np.testing.assert_allclose(weights, want.numpy(), rtol=1e-6)


def test_two_rope_thetas_are_refused(case: Case):
    """The library reads one of two places, the released code the other: they must agree."""
    raw = case.oracle.config.to_dict() | {"dtype": "float32"}
    raw["attn_config"] = {**raw["attn_config"], "rope_theta": 5e5}
    with pytest.raises(ValueError, match=r"500000.*3000"):
        from_hf(raw)


@pytest.mark.long
def test_released_model_has_its_size():
    """The config of the released model gives its 132 billion weights."""
    config = from_hf(
        {
            "model_type": "dbrx",
            "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500000},
            "d_model": 6144,
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
            "max_seq_len": 32768,
            "n_heads": 48,
            "n_layers": 40,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        }
    )
    assert round(num_weights(config) / 1e6) == 131597
    assert (config.rope.theta, config.clip_qkv, config.experts.topk_norm) == (5e5, 8.0, 1.0)
