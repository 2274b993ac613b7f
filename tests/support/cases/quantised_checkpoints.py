"""Checkpoint folders of tiny models with quantised maps, and their plain copies."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from support.oracles.quantised_files import FORMATS, store

from lora_jax.config import QuantizationConfig, from_hf
from lora_jax.models.checkpoint import SINGLE, Checkpoint

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "head_dim": 32,
}


def maps_of(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return [d_out, d_in] of every linear map below the head, routers included."""
    hidden, kv = config["hidden_size"], config["num_key_value_heads"] * 32
    maps = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            maps[f"{at}.self_attn.{name}_proj"] = (rows, hidden)
        experts = config.get("num_experts", 0)
        width = config["moe_intermediate_size" if experts else "intermediate_size"]
        for place in [f"{at}.mlp.experts.{e}" for e in range(experts)] or [f"{at}.mlp"]:
            maps[f"{place}.gate_proj"] = maps[f"{place}.up_proj"] = (width, hidden)
            maps[f"{place}.down_proj"] = (hidden, width)
        if experts:
            maps[f"{at}.mlp.gate"] = (experts, hidden)
    return maps


def plain_tensors(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return embedding, head and norms in bfloat16."""
    hidden = config["hidden_size"]
    tensors = {
        f"{name}.weight": rng.standard_normal((config["vocab_size"], hidden)) / hidden**0.5
        for name in ("model.embed_tokens", "lm_head")
    }
    norms = ["model.norm"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        norms += [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
        if "num_experts" in config:
            tensors |= {f"{at}.self_attn.{n}_norm.weight": np.ones(32) for n in ("q", "k")}
    tensors |= {f"{name}.weight": np.ones(hidden) for name in norms}
    return {name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}


def write_pair(folder: Path, form: str, config: dict[str, Any]) -> tuple[Path, Path]:
    """Return folders of one model in a format of FORMATS, and of its plain bfloat16 values."""
    rng = np.random.default_rng(0)
    plain = plain_tensors(config, rng)
    quantised = dict(plain)
    for name, shape in maps_of(config).items():
        stored = store(form, shape, rng)
        quantised |= {f"{name}.{part}": tensor for part, tensor in stored.tensors.items()}
        plain[f"{name}.weight"] = stored.values.astype(ml_dtypes.bfloat16)
    section = {"quantization_config": FORMATS[form].section}
    pair = (folder / "quantised", folder / "plain")
    for place, tensors, more in zip(pair, (quantised, plain), (section, {}), strict=True):
        place.mkdir(parents=True)
        save_file(tensors, place / SINGLE)
        (place / "config.json").write_text(json.dumps(config | more))
    return pair


def one_map(
    folder: Path, form: str, tensors: dict[str, np.ndarray]
) -> tuple[Checkpoint, QuantizationConfig | None]:
    """Return a checkpoint of one map `a.b`, and what a config of its format says."""
    save_file({f"a.b.{part}": tensor for part, tensor in tensors.items()}, folder / SINGLE)
    raw = LLAMA | {"quantization_config": FORMATS[form].section}
    return Checkpoint(folder), from_hf(raw).quantization
