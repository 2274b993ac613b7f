"""Models that are split: real shapes for speed, small ones with every kind of adapter for bits."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from bench.decode_step import QWEN3, TINY

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
}
QWEN3_30B = _COMMON | QWEN3 | {"rope_theta": 1e6, "max_position_embeddings": 40960}
QWEN3_30B |= {"num_hidden_layers": 48, "intermediate_size": 6144, "norm_topk_prob": True}
LLAMA_70B = _COMMON | {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
LLAMA_8B = LLAMA_70B | {"hidden_size": 4096, "intermediate_size": 14336}
LLAMA_8B |= {"num_hidden_layers": 32, "num_attention_heads": 32}
# Their parts on 2 and on 4 devices have widths that the kernels of Hopper GPUs take.
SMALL_MOE = _COMMON | {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
}
SMALL_DENSE = _COMMON | {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1024,
}
SPEED = {"qwen3-30b-a3b": QWEN3_30B, "llama-3.1-70b": LLAMA_70B, "llama-3.1-8b": LLAMA_8B}
SMALL = {"moe": SMALL_MOE, "dense": SMALL_DENSE}


def tiny(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a shape as small as a CPU can run it."""
    sizes = {name: size for name, size in TINY.items() if name in raw}
    sizes |= {"intermediate_size": 192, "num_hidden_layers": 2, "num_key_value_heads": 4}
    return raw | sizes


def write_config(folder: Path, raw: dict[str, Any]) -> Path:
    """Write a model folder of which `load_format` dummy makes random weights; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def write_lora(folder: Path, rank: int, alpha: float | None = None) -> str:
    """Write the config of an adapter on every map, whose matrices are made up; return its path.

    Adapters of equal configs would be one to the caches: `alpha` tells them apart.
    """
    folder.mkdir(parents=True)
    alpha = rank if alpha is None else alpha
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": TARGETS}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def write_esft(folder: Path, raw: dict[str, Any], experts: dict[int, list[int]], seed: int) -> str:
    """Write an ESFT adapter that replaces these experts of each layer; return its path."""
    rng, tensors = np.random.default_rng(seed), {}
    hidden, width = raw["hidden_size"], raw["moe_intermediate_size"]
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden)}
    shapes["down_proj"] = (hidden, width)
    for layer, replaced in experts.items():
        for expert in replaced:
            for name, shape in shapes.items():
                values = rng.standard_normal(shape, np.float32) * shape[1] ** -0.5
                key = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                tensors[key] = values.astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = {"experts": {str(layer): replaced for layer, replaced in experts.items()}}
    said |= {"shared_experts": False, "non_expert_modules": False}
    (folder / "expert_cfg.json").write_text(json.dumps(said))
    return str(folder)
