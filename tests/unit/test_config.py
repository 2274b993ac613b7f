"""config.json in both dialects, and what is refused by name."""

import copy
import dataclasses
import json
from typing import Any

import pytest

from lora_jax.config import (
    ClampedSwiglu,
    QuantizationConfig,
    RopeConfig,
    from_hf,
    known_model_types,
)

BASE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
MLA = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
YARN = {
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 1024,
}
# Per model: (hub's config, transformers 5's).
DIALECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            "torch_dtype": "bfloat16",
            "eos_token_id": [1, 2],
            "pretraining_tp": 1,
        },
        {
            "rope_parameters": {
                "rope_theta": 500000.0,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
            "dtype": "bfloat16",
            "eos_token_id": [1, 2],
            "head_dim": 8,
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
    "mistral": (
        {"sliding_window": 128, "rope_theta": 1e4},
        {
            "sliding_window": 128,
            "head_dim": 8,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        },
    ),
    "qwen2": (
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "sliding_window": 64,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
    ),
    "qwen3": (
        {"head_dim": 16, "use_sliding_window": False, "sliding_window": 64},
        {"head_dim": 16, "layer_types": ["full_attention"] * 3, "sliding_window": None},
    ),
    "mixtral": (
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6},
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": None,
            "sliding_window": None,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        },
    ),
    "qwen3_moe": (
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 1,
        },
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gpt_oss": (
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "experts_per_token": 2,
            "sliding_window": 128,
            "rope_theta": 150000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "rope_theta": 150000.0,
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "deepseek_v2": (
        {
            **MLA,
            "num_key_value_heads": 4,
            "rope_theta": 10000,
            "rope_scaling": {"type": "yarn", **YARN},
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
            "norm_topk_prob": False,
        },
        {
            **MLA,
            "num_key_value_heads": 4,
            "head_dim": 6,
            "qk_head_dim": 10,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "yarn", **YARN},
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 16.0,
        },
    ),
}
DBRX_HUB: dict[str, Any] = {
    "model_type": "dbrx",
    "vocab_size": 64,
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 64,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    "torch_dtype": "bfloat16",
}


def hub(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **BASE, **DIALECTS[model_type][0], **changes}


@pytest.mark.parametrize("model_type", DIALECTS)
def test_both_dialects_read_alike(model_type):
    old = {"model_type": model_type, **BASE, **DIALECTS[model_type][0]}
    new = {"model_type": model_type, **BASE, **DIALECTS[model_type][1]}
    assert from_hf(old) == from_hf(new)


def test_dbrx_reads_alike():
    new = copy.deepcopy(DBRX_HUB)
    new["rope_parameters"] = {"rope_theta": 500000, "rope_type": "default"}
    new["dtype"] = new.pop("torch_dtype")
    new["ffn_config"]["ffn_act_fn"] = {"name": "silu"}
    assert from_hf(DBRX_HUB) == from_hf(new)
    new["rope_parameters"]["rope_theta"] = 10000.0
    with pytest.raises(ValueError, match=r"is 500000\.0 in attn_config and 10000\.0"):
        from_hf(new)


def test_reading_does_not_change_the_dict():
    raw = hub("deepseek_v2")
    kept = copy.deepcopy(raw)
    from_hf(raw)
    assert raw == kept


QWEN_TOWER = {"depth": 3, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2}
QWEN3_TOWER = QWEN_TOWER | {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 2]}
QWEN25_TOWER = QWEN_TOWER | {"out_hidden_size": 32, "fullatt_block_indexes": [1]}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "image_size": 56,
    "patch_size": 14,
}
SECTIONS = {"mrope_section": [1, 1, 2], "mrope_interleaved": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
HUB_ROPE = {"rope_theta": 5e6, "rope_scaling": {"rope_type": "default", **SECTIONS}}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, **SECTIONS}}
BLOCKS = {"mrope_section": [1, 1, 2]}
FLAT_ROPE = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", **BLOCKS}}
# Per model with a tower: (hub's config, transformers 5's).
VISION_DIALECTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        {
            "tie_word_embeddings": True,
            "text_config": BASE | HUB_ROPE | {"torch_dtype": "bfloat16"},
            "vision_config": QWEN3_TOWER | {"model_type": "qwen3_vl"},
        },
        {
            "dtype": "bfloat16",
            "tie_word_embeddings": True,
            "text_config": BASE | ROPE | {"tie_word_embeddings": False},
            "vision_config": QWEN3_TOWER | {"model_type": "qwen3_vl_vision"},
            "image_token_id": 151655,
        },
    ),
    "qwen3_vl_moe": (
        {
            "text_config": BASE | HUB_ROPE | EXPERTS | {"norm_topk_prob": True},
            "vision_config": QWEN3_TOWER,
        },
        {"text_config": BASE | ROPE | EXPERTS, "vision_config": QWEN3_TOWER},
    ),
    "qwen2_5_vl": (
        BASE | FLAT_ROPE | {"vision_config": QWEN25_TOWER | {"in_chans": 3}},
        {
            "text_config": BASE
            | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **BLOCKS}},
            "vision_config": QWEN25_TOWER,
        },
    ),
    "llava": (
        {
            "image_token_index": 32000,
            "text_config": BASE | {"model_type": "llama", "rope_theta": 1e4},
            "vision_config": CLIP,
        },
        {
            "image_token_id": 32000,
            "text_config": BASE
            | {
                "model_type": "llama",
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "vision_config": CLIP,
        },
    ),
}


@pytest.mark.parametrize("model_type", VISION_DIALECTS)
def test_both_dialects_of_models_with_a_tower_are_equal(model_type):
    hub, ours = (from_hf({"model_type": model_type, **raw}) for raw in VISION_DIALECTS[model_type])
    assert hub == ours
    assert hub.model_type == model_type
    assert hub.tower.out_size == hub.hidden_size
    assert (hub.rope.sections is None) == (model_type == "llava")


VISION_REFUSED = [
    ("qwen3_vl", {"vision_config": {}}, "lacks vision_config"),
    ("qwen3_vl", {"vision_config": QWEN3_TOWER | {"out_hidden_size": 64}}, "out_hidden_size is 64"),
    ("qwen3_vl", {"vision_config": QWEN3_TOWER | {"num_position_embeddings": 5}}, "no square"),
    (
        "qwen3_vl",
        {"vision_config": QWEN3_TOWER | {"deepstack_visual_indexes": [3]}},
        "deepstack_visual_indexes",
    ),
    (
        "qwen3_vl",
        {"text_config": BASE | {"rope_scaling": {"mrope_section": [4, 4, 4]}}},
        "sum to 4",
    ),
    ("qwen3_vl_moe", {"text_config": BASE | EXPERTS | {"norm_topk_prob": False}}, "norm_topk_prob"),
    ("llava", {"vision_feature_layer": -1}, "vision_feature_layer"),
    ("llava", {"text_config": BASE | {"model_type": "mistral"}}, "model_type 'mistral'"),
    ("llava", {"vision_config": CLIP | {"model_type": "siglip_vision_model"}}, "siglip"),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), VISION_REFUSED)
def test_towers_that_are_not_done_are_refused_by_name(model_type, changes, message):
    with pytest.raises(ValueError, match=message):
        from_hf({"model_type": model_type, **VISION_DIALECTS[model_type][0], **changes})


@pytest.mark.parametrize("model_type", ["gemma3", "internvl", "qwen2_vl", "llava_next"])
def test_other_models_with_images_are_refused_with_the_reason(model_type):
    with pytest.raises(ValueError, match=f"{model_type} is not supported: "):
        from_hf({"model_type": model_type})


def test_every_known_type_is_tested():
    assert set(known_model_types()) == {*DIALECTS, "dbrx", *VISION_DIALECTS}


def test_configs_that_transformers_writes():
    """What transformers makes of a hub config reads as the hub config does."""
    transformers = pytest.importorskip("transformers")
    for model_type in ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt_oss"):
        raw = hub(model_type, tie_word_embeddings=False)
        raw.setdefault("num_experts_per_tok", raw.pop("experts_per_token", 2))
        known = dataclasses.replace(from_hf(raw), bos_token_id=None, eos_token_ids=())
        written = transformers.AutoConfig.for_model(**copy.deepcopy(raw)).to_dict()
        again = from_hf(json.loads(json.dumps(written, default=str)))
        assert dataclasses.replace(again, bos_token_id=None, eos_token_ids=()) == known, model_type


def test_llama_defaults():
    config = from_hf({"model_type": "llama", **BASE, "num_key_value_heads": None})
    assert config.num_kv_heads == 4
    assert config.head_dim == 8
    assert config.attention_scale == pytest.approx(8**-0.5)
    assert config.rope == RopeConfig("default", 8, 10000.0)
    assert config.sliding_windows == (None, None, None)
    assert config.eos_token_ids == ()
    assert from_hf({"model_type": "llama", **BASE, "eos_token_id": 7}).eos_token_ids == (7,)


def test_sparse_layers_of_qwen3_moe():
    assert from_hf(hub("qwen3_moe")).experts.layers == (0, 2)
    assert from_hf(hub("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[])).experts.layers == (
        1,
    )
    assert from_hf(hub("qwen3_moe")).experts.topk_norm == 1.0
    assert from_hf(hub("qwen3_moe", norm_topk_prob=False)).experts.topk_norm is None


def test_gpt_oss():
    config = from_hf(hub("gpt_oss", quantization_config={"quant_method": "mxfp4"}))
    assert config.quantization == QuantizationConfig("mxfp4", "mxfp4", 32)
    assert config.qkv_bias
    assert config.o_bias
    assert config.sliding_windows == (128, None, 128)
    assert config.experts.swiglu == ClampedSwiglu(1.702, 7.0)
    assert not config.experts.softmax_first
    assert not config.rope.truncate
    assert config.rope.magnitude == pytest.approx(1.3465735902799727)


def test_deepseek_v2():
    config = from_hf(hub("deepseek_v2"))
    assert config.head_dim == 10
    assert config.rope.dim == 6
    assert config.rope.magnitude == 1.0  # mscale and mscale_all_dim cancel here, and ...
    assert config.attention_scale == pytest.approx(10**-0.5 * 1.2608037774**2)  # ... go here
    moe = config.experts
    assert (moe.layers, moe.shared_size, moe.num_groups, moe.topk_groups) == ((1, 2), 40, 4, 2)
    assert (moe.topk_norm, moe.weight_scale) == (None, 16.0)
    normalised = from_hf(hub("deepseek_v2", norm_topk_prob=True)).experts
    assert (normalised.topk_norm, normalised.weight_scale) == (1.0, 1.0)
    assert from_hf(hub("deepseek_v2", topk_method="greedy")).experts.num_groups == 1
    assert from_hf(hub("deepseek_v2", q_lora_rank=None)).latent.q_lora_rank is None
    dense = from_hf(hub("deepseek_v2", n_routed_experts=None))
    assert dense.moe is None


def compressed(**weights) -> dict:
    """Return a compressed-tensors section of int4 groups with changes to its weights."""
    arguments = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights
    groups = {"group_0": {"weights": arguments, "targets": ["Linear"]}}
    form = "float-quantized" if arguments["type"] == "float" else "pack-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


FP8 = {"num_bits": 8, "type": "float", "group_size": None}
QUANTIZED = [
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        QuantizationConfig("bitsandbytes", "nf4"),
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        QuantizationConfig("fp8", "fp8", block=(128, 128)),
    ),
    ({"quant_method": "fp8"}, QuantizationConfig("fp8", "fp8")),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
        QuantizationConfig("gptq", "int4", 128, zero_offset=1),
    ),
    (
        {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
        QuantizationConfig("gptq", "int4", symmetric=False),
    ),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        QuantizationConfig("awq", "int4", 64, symmetric=False),
    ),
    (compressed(), QuantizationConfig("compressed-tensors", "int4", 32)),
    (
        compressed(strategy="channel", symmetric=False, actorder="weight"),
        QuantizationConfig("compressed-tensors", "int4", symmetric=False),
    ),
    (compressed(**FP8, strategy="channel"), QuantizationConfig("compressed-tensors", "fp8")),
    (
        compressed(**FP8, strategy="block", block_structure=[128, 64]),
        QuantizationConfig("compressed-tensors", "fp8", block=(128, 64)),
    ),
]


@pytest.mark.parametrize(("section", "want"), QUANTIZED, ids=range(len(QUANTIZED)))
def test_quantization_of_every_method(section, want):
    assert from_hf(hub("llama", quantization_config=section)).quantization == want


def changed(**changes) -> dict:
    return compressed() | changes


NOT_QUANTIZED = [
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit is not supported"),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf3"},
        "bnb_4bit_quant_type 'nf3' is not supported, only 'nf4' or 'fp4'",
    ),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is .128., not two"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "not two positive integers"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported, only 'e4m3'"),
    ({"quant_method": "gptq", "bits": 8}, "bits 8 is not supported, only 4"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 33}, "group_size 33 is odd"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0, not a positive"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported"),
    (compressed(actorder="group"), "actorder 'group' is not supported, only None or 'weight'"),
    (compressed(num_bits=8), "format 'pack-quantized' of 8 bits, type 'int' is not supported"),
    (compressed(strategy="tensor"), "strategy 'tensor' is not supported, only 'group' or 'chan"),
    (changed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is not supported"),
    (changed(sparsity_config={"format": "sparse-24"}), "format 'sparse-24' is not supported"),
    (changed(config_groups={}), "config_groups must be of one format, got none"),
    (
        changed(
            config_groups=compressed()["config_groups"]
            | {"group_1": compressed(group_size=64)["config_groups"]["group_0"]}
        ),
        "config_groups must be of one format, got Quant",
    ),
]


@pytest.mark.parametrize(("section", "message"), NOT_QUANTIZED, ids=[m for _, m in NOT_QUANTIZED])
def test_quantization_that_is_refused_by_name(section, message):
    with pytest.raises(ValueError, match=message):
        from_hf(hub("llama", quantization_config=section))


REFUSED = [
    ("llama", {"model_type": "gpt2"}, "'gpt2' is not supported; known are dbrx, deepseek_v2"),
    ("llama", {"model_type": None}, "model_type None is not supported"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' .*only default"),
    ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope type 'mrope'"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "lacks factor"),
    (
        "llama",
        {"rope_parameters": {"full_attention": {}, "rope_theta": 1}},
        "one rope per layer type",
    ),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
    ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config 'mxfp4'"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config None"),
    ("llama", {"quantization_config": {"quant_method": "quip"}}, "'quip' .* one of awq, bitsand"),
    ("llama", {"hidden_size": None}, "lacks hidden_size"),
    ("llama", {"hidden_size": -1}, "hidden_size is -1, not a positive integer"),
    ("llama", {"vocab_size": "64"}, "vocab_size is '64'"),
    ("llama", {"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny', not a number"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not true or false"),
    ("llama", {"num_key_value_heads": 3}, "4 attention heads do not divide among 3"),
    ("llama", {"rope_scaling": "yarn"}, "rope_scaling is 'yarn', not an object"),
    ("qwen3", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen3", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    ("mixtral", {"num_local_experts": None}, "lacks num_local_experts or num_experts"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid'"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), REFUSED)
def test_refused_by_name(model_type, changes, message):
    with pytest.raises(ValueError, match=message):
        from_hf(hub(model_type) | changes)
