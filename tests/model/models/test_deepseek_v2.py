"""DeepSeek-V2 and V2-Lite against transformers."""

import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.contracts.model_contract import OTHERS, PROMPT, Case, ModelContract, make_case, shaken
from support.drivers.model_driver import (
    TINY,
    TOLERANCE,
    WIDTH,
    Driver,
    fill_slots,
    fuse_experts,
    old_keys,
    oracle_logits,
    save_oracle,
)
from support.oracles.merged_oracle import named_lora, num_weights, weight_by_path

from lora_jax.config import from_hf
from lora_jax.models import load, model_class

HIDDEN, DENSE, EXPERTS, HEADS = 32, 40, 6, 4
NOPE, ROPE, V_DIM, LATENT, Q_RANK = 10, 6, 14, 20, 18
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.9,
    "mscale_all_dim": 0.6,
    "original_max_position_embeddings": 16,
}
LITE = {
    "q_lora_rank": None,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def make_deepseek(**changes: Any) -> transformers.DeepseekV2ForCausalLM:
    """A dense layer and one with experts, of which two of three groups are open to a token."""
    sizes = {
        "num_key_value_heads": HEADS,
        "intermediate_size": DENSE,
        "moe_intermediate_size": WIDTH,
        "kv_lora_rank": LATENT,
        "q_lora_rank": Q_RANK,
        "qk_rope_head_dim": ROPE,
        "qk_nope_head_dim": NOPE,
        "v_head_dim": V_DIM,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 3,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 0.01,  # unlike the eps of the norms over latents
        "rope_parameters": dict(YARN),
    }
    transformers.set_seed(0)
    config = transformers.DeepseekV2Config(**{**TINY, **sizes, **changes})
    return shaken(transformers.DeepseekV2ForCausalLM(config))


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    parts = ("gate_proj", "up_proj", "down_proj")
    return fuse_experts(tensors, parts, "model.layers.{layer}.mlp.experts")


def hub_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of the released models, which say nothing of head_dim."""
    for name in ("head_dim", "qk_head_dim", "mlp_bias"):
        del config[name]
    extra = {"moe_layer_freq": 1, "scoring_func": "softmax", "seq_aux": True, "ep_size": 1}
    return old_keys(config | extra)


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    tmp = tmp_path_factory.mktemp("deepseek_v2")
    return make_case(tmp, make_deepseek(), fused, hub_config)


class TestDeepseekV2(ModelContract):
    """Low-rank q, yarn with both mscales, group-limited experts, a dense and a shared MLP."""

    stands_for_others = True


def test_cache_holds_the_latent_only(case: Case):
    cache = case.driver.new_cache(1)
    assert cache[0].k.shape[2:] == (1, LATENT + ROPE)
    assert cache[0].v.size == 0


def lora_shapes(q_rank: int | None) -> dict[str, tuple[int, int]]:
    """(d_out, d_in) of every linear map of both layers, by the names that adapter files use."""
    shapes = {"lm_head": (64, HIDDEN)}
    q_size = HEADS * (NOPE + ROPE)
    for layer in range(2):
        at = f"model.layers.{layer}.self_attn"
        shapes[f"{at}.kv_a_proj_with_mqa"] = (LATENT + ROPE, HIDDEN)
        shapes[f"{at}.kv_b_proj"] = (HEADS * (NOPE + V_DIM), LATENT)
        shapes[f"{at}.o_proj"] = (HIDDEN, HEADS * V_DIM)
        if q_rank is None:
            shapes[f"{at}.q_proj"] = (q_size, HIDDEN)
        else:
            shapes |= {f"{at}.q_a_proj": (q_rank, HIDDEN), f"{at}.q_b_proj": (q_size, q_rank)}
    mlps = {"layers.0.mlp": DENSE, "layers.1.mlp.shared_experts": 2 * WIDTH}
    mlps |= {f"layers.1.mlp.experts.{expert}": WIDTH for expert in range(EXPERTS)}
    for at, width in mlps.items():
        shapes |= {f"model.{at}.{n}": (width, HIDDEN) for n in ("gate_proj", "up_proj")}
        shapes[f"model.{at}.down_proj"] = (HIDDEN, width)
    return shapes | {"model.layers.1.mlp.gate": (EXPERTS, HIDDEN)}


def weight_of(model: Any, path: str) -> torch.Tensor:
    """Return the view [d_out, d_in] of a parameter: gate's rows come before up's."""
    found = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)", path)
    if found is None:
        return weight_by_path(model, path)
    experts, expert = model.get_submodule(found[1]), int(found[2])
    if found[3] == "down_proj":
        return experts.down_proj[expert]
    rows = slice(0, WIDTH) if found[3] == "gate_proj" else slice(WIDTH, 2 * WIDTH)
    return experts.gate_up_proj[expert, rows]


def check_adapter_file(oracle: Any, model: Any, driver: Driver, tmp_path, q_rank: int | None):
    """Names of files, kv_b_proj among them as one matrix; the base beside it as without it."""
    catalogue = model.catalogue(driver.config)
    lora = named_lora(lora_shapes(q_rank))
    table = fill_slots(catalogue, [lora.read_back(tmp_path / "adapter", catalogue)])
    prompts, slots = [PROMPT, OTHERS[0]], [0, -1]
    got = driver.run(prompts, slots=slots, adapters=table, max_rank=lora.rank)
    want = oracle_logits(lora.merged_into(oracle, weight_of), PROMPT)
    np.testing.assert_allclose(got[0], want, atol=TOLERANCE, rtol=0)
    base = oracle_logits(oracle, OTHERS[0])
    np.testing.assert_allclose(got[1], base, atol=TOLERANCE, rtol=0)


def test_adapter_file_equals_merged_oracle(case: Case, tmp_path):
    check_adapter_file(case.oracle, case.model, case.driver, tmp_path, Q_RANK)


def test_lite_with_plain_q_and_greedy_experts(tmp_path):
    oracle = make_deepseek(**LITE).eval()
    model, config = load(save_oracle(oracle, tmp_path / "model"))
    assert "q_a_proj" not in model.catalogue(config).modules
    check_adapter_file(oracle, model, Driver(model, config), tmp_path, None)


def test_an_adapter_that_names_the_wrong_q_is_refused(case: Case, tmp_path):
    """Every path must lead somewhere; q_proj exists in the Lite model only."""
    catalogue = case.model.catalogue(case.config)
    lora = named_lora({"model.layers.0.self_attn.q_proj": (HEADS * (NOPE + ROPE), HIDDEN)})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        lora.read_back(tmp_path / "adapter", catalogue)


def test_a_model_without_experts_is_dense():
    raw = make_deepseek().config.to_dict() | {"dtype": "float32", "n_routed_experts": None}
    config = from_hf(raw)
    catalogue = model_class("deepseek_v2").catalogue(config)
    assert catalogue.modules["gate_proj"].layers == (0, 1)
    assert not any(name.startswith(("experts.", "shared_", "router")) for name in catalogue.modules)


RELEASED = {
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}  # the Lite model
LARGE = {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}


@pytest.mark.long
@pytest.mark.parametrize(("changes", "millions"), [({}, 15706), (LARGE, 235741)])
def test_released_models_have_their_size(changes, millions):
    config = from_hf(RELEASED | changes)
    assert round(num_weights(config) / 1e6) == millions
    growth = 0.1 * 0.707 * np.log(40) + 1
    assert config.attention_scale == pytest.approx((128 + 64) ** -0.5 * growth**2)
    assert config.rope.magnitude == 1.0  # both mscales are equal
    shape = model_class("deepseek_v2").kv_shape(config)
    assert shape.bytes_per_token(np.dtype(np.float16)) == config.num_layers * 576 * 2


def test_norm_topk_prob_normalises_instead_of_scaling():
    """As in the released modelling code; transformers 5 ignores the key."""
    moe = from_hf(RELEASED | LARGE | {"norm_topk_prob": True}).experts
    assert (moe.topk_norm, moe.weight_scale) == (1.0, 1.0)
    moe = from_hf(RELEASED | LARGE).experts
    assert (moe.topk_norm, moe.weight_scale) == (None, 16.0)
