"""config.json in both dialects, and what is refused by name."""

import copy
import dataclasses
import json
from typing import Any

import pytest
from support.cases.config_cases import BASE, DBRX_HUB, DIALECTS, hub

from lora_jax.config import (
    ClampedSwiglu,
    QuantizationConfig,
    RopeConfig,
    from_hf,
    known_model_types,
)


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


def test_a_file_that_holds_no_object_is_refused():
    for raw in ([], "llama", 3, None):
        with pytest.raises(ValueError, match=r"config\.json must hold a JSON object"):
            from_hf(raw)
    for odd in ([], {}, ["llama"], None):
        with pytest.raises(ValueError, match=r"model_type .* is not supported; supported are"):
            from_hf({"model_type": odd})


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
    ("llava", {"multimodal_projector_bias": False}, "a projector without biases"),
    ("llava", {"vision_config": CLIP | {"image_size": 100}}, "image_size 100 is no multiple of 14"),
    (
        "qwen2_5_vl",
        {"vision_config": QWEN25_TOWER | {"window_size": 20}},
        "window_size 20 is less than a cell of 28",
    ),
]


@pytest.mark.parametrize(("model_type", "changes", "message"), VISION_REFUSED)
def test_towers_that_are_not_done_are_refused_by_name(model_type, changes, message):
    with pytest.raises(ValueError, match=message):
        from_hf({"model_type": model_type, **VISION_DIALECTS[model_type][0], **changes})


def test_parts_that_a_model_needs_and_lacks_are_named():
    config = from_hf({"model_type": "llama", **BASE})
    for part, why in (
        ("experts", "llama needs experts"),
        ("latent", "llama needs latent attention"),
        ("tower", "llama needs a vision tower"),
    ):
        with pytest.raises(ValueError, match=f"{why}, and its config has none"):
            getattr(config, part)


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
        known = dataclasses.replace(from_hf(raw), eos_token_ids=())
        written = transformers.AutoConfig.for_model(**copy.deepcopy(raw)).to_dict()
        again = from_hf(json.loads(json.dumps(written, default=str)))
        assert dataclasses.replace(again, eos_token_ids=()) == known, model_type


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


REFUSED = [
    ("llama", {"model_type": "gpt2"}, "'gpt2' is not supported; supported are dbrx, deepseek_v2"),
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
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config: quant_method None"),
    (
        "llama",
        {"quantization_config": {"quant_method": "quip"}},
        "'quip' is not supported, only awq, bitsand",
    ),
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
