"""Configs of tiny models in both dialects: the hub's, and what transformers 5 writes."""

from typing import Any

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
    """Return the config of a tiny model as the hub has it, with changes."""
    return {"model_type": model_type, **BASE, **DIALECTS[model_type][0], **changes}
