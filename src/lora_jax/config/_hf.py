"""One reader per model_type: config.json in either dialect to a ModelConfig."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from lora_jax.config._keys import Keys
from lora_jax.config._quantization import read_quantization
from lora_jax.config._rope import read_rope, yarn_magnitude
from lora_jax.config._types import ClampedSwiglu, MlaConfig, ModelConfig, MoeConfig
from lora_jax.config._vision import (
    REFUSED,
    read_vision,
    section_fields,
    text_keys,
    without_sections,
)


def from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a parsed config.json.

    Raises:
        ValueError: naming an unknown model_type, a missing or wrong key, or a feature not done.
    """
    if not isinstance(raw, Mapping):
        raise ValueError("config.json must hold a JSON object.")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        allowed = ", ".join(known_model_types())
        if isinstance(model_type, str) and model_type in REFUSED:
            raise ValueError(f"{model_type} is not supported: {REFUSED[model_type]}.")
        raise ValueError(f"model_type {model_type!r} is not supported; supported are {allowed}.")
    keys = Keys(raw, model_type)
    config = _READERS[model_type](keys)
    config = dataclasses.replace(config, quantization=read_quantization(keys))
    if config.quantization is not None:
        config = dataclasses.replace(config, original=_original(raw))
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"{model_type}: {config.num_heads} attention heads do not divide among "
            f"{config.num_kv_heads} key-value heads."
        )
    return config


def _original(raw: Mapping[str, Any]) -> str | None:
    """Return the last part of the path from which a tool read the model; None if it is not said."""
    path = raw.get("_name_or_path")
    return (PurePosixPath(path).name or None) if isinstance(path, str) else None


def known_model_types() -> tuple[str, ...]:
    """Return every model_type that `from_hf` reads, sorted."""
    return tuple(sorted(_READERS))


def _base(keys: Keys, theta: float = 1e4, **fields: Any) -> ModelConfig:
    """Return what the models with Llama's key names share."""
    keys.only("hidden_act", "silu")
    heads = keys.size("num_attention_heads")
    layers = keys.size("num_hidden_layers")
    hidden = keys.size("hidden_size")
    head_dim = fields.pop("head_dim", None) or keys.size("head_dim", default=hidden // heads)
    rope_dim = fields.pop("rope_dim", head_dim)
    values = {
        "num_kv_heads": keys.size("num_key_value_heads", default=heads),
        "attention_scale": head_dim**-0.5,
        "sliding_windows": (None,) * layers,
        "tie_embeddings": keys.flag("tie_word_embeddings"),
        **fields,
    }
    return ModelConfig(
        model_type=keys.where,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        head_dim=head_dim,
        intermediate_size=keys.size("intermediate_size"),
        max_positions=keys.size("max_position_embeddings"),
        norm_eps=keys.number("rms_norm_eps"),
        rope=read_rope(keys, rope_dim, theta),
        **_tokens_and_dtype(keys),
        **values,
    )


def _tokens_and_dtype(keys: Keys) -> dict[str, Any]:
    eos = keys.get("eos_token_id", default=())
    dtype = keys.get("dtype", "torch_dtype", default=None)
    return {
        "eos_token_ids": (eos,) if isinstance(eos, int) else tuple(eos),
        "dtype": None if dtype is None else str(dtype).removeprefix("torch."),
    }


def _windows(keys: Keys, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Return the sliding window of each layer: of those `layer_types` names, else of `slides`."""
    layers = keys.size("num_hidden_layers")
    types = keys.get("layer_types", default=None)
    if types is None:
        chosen = [slides(layer) for layer in range(layers)]
    elif len(types) != layers or set(types) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"{keys.where}: layer_types {types!r} is not supported.")
    else:
        chosen = [kind == "sliding_attention" for kind in types]
    if not any(chosen):
        return (None,) * layers
    window = keys.get("sliding_window", default=None)
    size = None if window is None else keys.size("sliding_window")
    return tuple(size if slide else None for slide in chosen)


def _llama(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias")
    return _base(keys, qkv_bias=bias, o_bias=bias, mlp_bias=keys.flag("mlp_bias"))


def _mistral(keys: Keys) -> ModelConfig:
    return _base(keys, sliding_windows=_windows(keys, lambda layer: True))


def _qwen2(keys: Keys) -> ModelConfig:
    return _base(keys, qkv_bias=True, sliding_windows=_qwen_windows(keys))


def _qwen3(keys: Keys) -> ModelConfig:
    bias = keys.flag("attention_bias")
    windows = _qwen_windows(keys)
    return _base(keys, qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=windows)


def _qwen_windows(keys: Keys) -> tuple[int | None, ...]:
    use, first = keys.flag("use_sliding_window"), keys.get("max_window_layers", default=0)
    return _windows(keys, lambda layer: use and layer >= first)


def _mixtral(keys: Keys) -> ModelConfig:
    moe = MoeConfig(
        num_experts=keys.size("num_local_experts", "num_experts"),
        top_k=keys.size("num_experts_per_tok", default=2),
        intermediate_size=keys.size("intermediate_size"),
        layers=tuple(range(keys.size("num_hidden_layers"))),
        topk_norm=1.0,
    )
    windows = _windows(keys, lambda layer: True)
    return _base(keys, theta=1e6, moe=moe, sliding_windows=windows)


def _qwen3_moe(keys: Keys) -> ModelConfig:
    step, dense = (
        keys.size("decoder_sparse_step", default=1),
        keys.get("mlp_only_layers", default=()),
    )
    layers = range(keys.size("num_hidden_layers"))
    moe = MoeConfig(
        num_experts=keys.size("num_experts", "num_local_experts"),
        top_k=keys.size("num_experts_per_tok"),
        intermediate_size=keys.size("moe_intermediate_size"),
        layers=tuple(n for n in layers if n not in dense and (n + 1) % step == 0),
        topk_norm=1.0 if keys.flag("norm_topk_prob") else None,
    )
    bias, use = keys.flag("attention_bias"), keys.flag("use_sliding_window")
    windows = _windows(keys, lambda layer: use)
    return _base(keys, moe=moe, qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_windows=windows)


def _gpt_oss(keys: Keys) -> ModelConfig:
    moe = MoeConfig(
        num_experts=keys.size("num_local_experts", "num_experts"),
        top_k=keys.size("num_experts_per_tok", "experts_per_token"),
        intermediate_size=keys.size("intermediate_size"),
        layers=tuple(range(keys.size("num_hidden_layers"))),
        softmax_first=False,
        bias=True,
        swiglu=ClampedSwiglu(
            keys.number("swiglu_alpha", default=1.702), keys.number("swiglu_limit", default=7.0)
        ),
    )
    bias = keys.flag("attention_bias", True)
    return _base(
        keys,
        theta=150000.0,
        head_dim=keys.size("head_dim", default=64),
        moe=moe,
        qkv_bias=bias,
        o_bias=bias,
        sliding_windows=_windows(keys, lambda layer: layer % 2 == 0),
    )


def _deepseek_v2(keys: Keys) -> ModelConfig:
    mla = MlaConfig(
        q_lora_rank=keys.get("q_lora_rank", default=None) and keys.size("q_lora_rank"),
        kv_lora_rank=keys.size("kv_lora_rank"),
        nope_dim=keys.size("qk_nope_head_dim"),
        rope_dim=keys.size("qk_rope_head_dim"),
        v_dim=keys.size("v_head_dim"),
    )
    head_dim, bias = mla.nope_dim + mla.rope_dim, keys.flag("attention_bias")
    config = _base(
        keys,
        head_dim=head_dim,
        rope_dim=mla.rope_dim,
        num_kv_heads=keys.size("num_attention_heads"),
        mla=mla,
        moe=_deepseek_moe(keys),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=keys.flag("mlp_bias"),
    )
    scaling = keys.section("rope_parameters" if keys.raw.get("rope_parameters") else "rope_scaling")
    mscale = scaling.number("mscale_all_dim", default=0.0)
    if config.rope.kind == "default" or not mscale:
        return config
    growth = yarn_magnitude(config.rope.factor, mscale) ** 2
    return dataclasses.replace(config, attention_scale=head_dim**-0.5 * growth)


def _deepseek_moe(keys: Keys) -> MoeConfig | None:
    """Return DeepSeek-V2's experts; weights that are renormalised are not scaled (its own code)."""
    if keys.get("n_routed_experts", "num_local_experts", default=None) is None:
        return None
    keys.only("scoring_func", "softmax")
    keys.only("moe_layer_freq", 1)
    keys.only("topk_method", "greedy", "group_limited_greedy")
    grouped = keys.get("topk_method", default="greedy") == "group_limited_greedy"
    top_k, size = keys.size("num_experts_per_tok"), keys.size("moe_intermediate_size")
    normalised = keys.flag("norm_topk_prob") and top_k > 1
    first = keys.get("first_k_dense_replace", default=0)
    return MoeConfig(
        num_experts=keys.size("n_routed_experts", "num_local_experts"),
        top_k=top_k,
        intermediate_size=size,
        layers=tuple(range(first, keys.size("num_hidden_layers"))),
        topk_norm=1.0 if normalised else None,
        weight_scale=1.0 if normalised else keys.number("routed_scaling_factor", default=1.0),
        num_groups=keys.size("n_group") if grouped else 1,
        topk_groups=keys.size("topk_group") if grouped else 1,
        shared_size=size * keys.get("n_shared_experts", default=0),
    )


def _dbrx(keys: Keys) -> ModelConfig:
    attn, ffn = keys.section("attn_config"), keys.section("ffn_config")
    ffn.section("ffn_act_fn").only("name", "silu")
    hidden, heads, layers = keys.size("d_model"), keys.size("n_heads"), keys.size("n_layers")
    norm = ffn.raw.get("moe_normalize_expert_weights", 1.0)
    moe = MoeConfig(
        num_experts=ffn.size("moe_num_experts"),
        top_k=ffn.size("moe_top_k"),
        intermediate_size=ffn.size("ffn_hidden_size"),
        layers=tuple(range(layers)),
        topk_norm=None if norm is None else float(norm),
    )
    rope = read_rope(keys, hidden // heads, attn.number("rope_theta", default=1e4))
    theta = attn.number("rope_theta", default=rope.theta)
    if theta != rope.theta:
        raise ValueError(f"dbrx: rope_theta is {theta} in attn_config and {rope.theta} elsewhere.")
    clip = attn.get("clip_qkv", default=None)
    return ModelConfig(
        model_type="dbrx",
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=attn.size("kv_n_heads"),
        head_dim=hidden // heads,
        intermediate_size=moe.intermediate_size,
        max_positions=keys.size("max_seq_len"),
        norm_eps=1e-5,  # of torch's LayerNorm; the config has no key for it
        rope=rope,
        attention_scale=(hidden // heads) ** -0.5,
        sliding_windows=(None,) * layers,
        tie_embeddings=keys.flag("tie_word_embeddings"),
        clip_qkv=None if clip is None else attn.number("clip_qkv"),
        moe=moe,
        **_tokens_and_dtype(keys),
    )


def _qwen3_vl(keys: Keys) -> ModelConfig:
    return _with_vision(keys, _qwen3)


def _qwen3_vl_moe(keys: Keys) -> ModelConfig:
    return _with_vision(keys, lambda text: _qwen3_moe(_normalised(text)))


def _normalised(keys: Keys) -> Keys:
    """Return the keys of a model whose router always normalises, said or not."""
    if not keys.flag("norm_topk_prob", True):
        raise ValueError(f"{keys.where}: norm_topk_prob false is not supported.")
    return Keys({**keys.raw, "norm_topk_prob": True}, keys.where)


def _qwen2_5_vl(keys: Keys) -> ModelConfig:
    return _with_vision(keys, _qwen2)


def _llava(keys: Keys) -> ModelConfig:
    return _with_vision(keys, _llama)


def _with_vision(keys: Keys, read_text: Callable[[Keys], ModelConfig]) -> ModelConfig:
    """Return the config of a language model beside its tower."""
    text, sections = without_sections(text_keys(keys))
    config = read_text(text)
    rope = dataclasses.replace(config.rope, **section_fields(sections, config.rope.dim))
    vision = read_vision(keys, config.hidden_size)
    return dataclasses.replace(config, model_type=keys.where, rope=rope, vision=vision)


_READERS: dict[Any, Callable[[Keys], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "dbrx": _dbrx,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen2_5_vl": _qwen2_5_vl,
    "llava": _llava,
}
