"""Tiny random mixtures of experts of three kinds, ESFT adapters for them, and the merged models."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file
from support.cases.tiny_checkpoint import TinyShape, write_model, write_tokenizer

VOCAB, HIDDEN, WIDTH, EXPERTS, HEADS, LAYERS = 260, 32, 24, 6, 4, 3
HEAD_DIM, NOPE, ROPE, V_DIM, LATENT, DENSE = 8, 8, 4, 8, 16, 40
KINDS = ("mixtral", "qwen3_moe", "deepseek_v2")
MOE_LAYERS = {"mixtral": (0, 1), "qwen3_moe": (0, 2), "deepseek_v2": (1, 2)}
MIXTRAL = TinyShape(hidden=HIDDEN, width=WIDTH, experts=EXPERTS, max_positions=96)
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight")
_COMMON = {
    "vocab_size": VOCAB,
    "intermediate_size": DENSE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CONFIGS = {
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "num_experts": EXPERTS,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "deepseek_v2": {
        "num_key_value_heads": HEADS,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": V_DIM,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
}


def _attention(kind: str, hidden: int) -> dict[str, tuple[int, ...]]:
    if kind == "qwen3_moe":
        return {
            "q_proj": (HEADS * HEAD_DIM, hidden),
            "k_proj": (2 * HEAD_DIM, hidden),
            "v_proj": (2 * HEAD_DIM, hidden),
            "o_proj": (hidden, HEADS * HEAD_DIM),
            "q_norm": (HEAD_DIM,),
            "k_norm": (HEAD_DIM,),
        }
    return {
        "q_proj": (HEADS * (NOPE + ROPE), hidden),
        "kv_a_proj_with_mqa": (LATENT + ROPE, hidden),
        "kv_a_layernorm": (LATENT,),
        "kv_b_proj": (HEADS * (NOPE + V_DIM), LATENT),
        "o_proj": (hidden, HEADS * V_DIM),
    }


def write_moe(
    folder: Path, kind: str, seed: int = 0, *, hidden: int = HIDDEN, width: int = WIDTH
) -> Path:
    """Write a random model of one of KINDS, one tensor per expert matrix; return the folder.

    `hidden` and the experts' `width` are for kinds other than Mixtral.
    """
    if kind == "mixtral":
        write_model(folder, MIXTRAL, seed)
        return folder
    rng = np.random.default_rng(seed)
    shapes = _shapes(kind, hidden, width)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.weight": _random(rng, dims) for name, dims in shapes.items()}
    tensors["model.embed_tokens.weight"] *= hidden**0.5
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"hidden_size": hidden, "moe_intermediate_size": width, "model_type": kind}
    (folder / "config.json").write_text(json.dumps(_COMMON | sizes | _CONFIGS[kind]))
    write_tokenizer(folder)
    return folder


def _shapes(kind: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, in the order in which they are drawn."""
    shapes = {
        "model.embed_tokens": (VOCAB, hidden),
        "model.norm": (hidden,),
        "lm_head": (VOCAB, hidden),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{n}": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.{n}": dims for n, dims in _attention(kind, hidden).items()}
        if layer not in MOE_LAYERS[kind]:
            shapes |= _mlp(f"{at}.mlp", DENSE, hidden)
            continue
        shapes[f"{at}.mlp.gate"] = (EXPERTS, hidden)
        for expert in range(EXPERTS):
            shapes |= _mlp(f"{at}.mlp.experts.{expert}", width, hidden)
        if kind == "deepseek_v2":
            shapes |= _mlp(f"{at}.mlp.shared_experts", width, hidden)
    return shapes


def _mlp(at: str, width: int, hidden: int = HIDDEN) -> dict[str, tuple[int, ...]]:
    wide, narrow = (width, hidden), (hidden, width)
    return {f"{at}.gate_proj": wide, f"{at}.up_proj": wide, f"{at}.down_proj": narrow}


def _random(rng: np.random.Generator, dims: tuple[int, ...]) -> np.ndarray:
    if len(dims) == 1:
        return rng.uniform(0.5, 1.5, dims).astype("f4")
    return (rng.standard_normal(dims) * 1.7 * dims[-1] ** -0.5).astype("f4")


def random_choice(kind: str, rng: np.random.Generator, most: int = 3) -> dict[int, tuple[int, ...]]:
    """Return 1 to `most` experts for some layers, at least one of them."""
    layers = [layer for layer in MOE_LAYERS[kind] if rng.random() < 0.8]
    return {
        layer: tuple(sorted(rng.choice(EXPERTS, rng.integers(1, most + 1), replace=False).tolist()))
        for layer in layers or MOE_LAYERS[kind][:1]
    }


def write_esft_adapter(
    folder: Path,
    base: Path,
    experts: Mapping[int, Sequence[int]],
    seed: int,
    *,
    shards: int = 1,
    rename: Callable[[str], str] = lambda name: name,
) -> dict[str, np.ndarray]:
    """Write new weights for the experts of a model folder; return them by their hub names.

    `rename` changes the names in the files, `shards` is the number of files.
    """
    rng, tensors = np.random.default_rng(seed), {}
    for name, old in sorted(load_file(base / "model.safetensors").items()):
        found = _EXPERT.fullmatch(name)
        if found and int(found[2]) in experts.get(int(found[1]), ()):
            tensors[name] = _random(rng, old.shape).astype(old.dtype)
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    for shard in range(shards):
        part = {rename(name): tensors[name] for name in names[shard::shards]}
        save_file(part, folder / f"part-{shard}.safetensors", metadata={"format": "pt"})
    config = {
        "experts": {str(layer): list(ids) for layer, ids in experts.items()},
        "shared_experts": False,
        "non_expert_modules": False,
    }
    (folder / "expert_cfg.json").write_text(json.dumps(config))
    return tensors


def write_lora_adapter(
    folder: Path, kind: str, rank: int, seed: int, *, hidden: int = HIDDEN, width: int = WIDTH
) -> None:
    """Write a PEFT LoRA on o_proj of every layer and on all experts of every layer that has any."""
    rng, tensors = np.random.default_rng(seed), {}
    block = "block_sparse_moe" if kind == "mixtral" else "mlp"
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    shapes = dict(zip(names, _mlp("", width, hidden).values(), strict=True))
    heads = HIDDEN  # the width of all heads together, in every kind
    maps = {f"{layer}.self_attn.o_proj": (hidden, heads) for layer in range(2)}
    for layer in MOE_LAYERS[kind]:
        for expert in range(EXPERTS):
            at = f"{layer}.{block}.experts.{expert}"
            maps |= {f"{at}.{name}": dims for name, dims in shapes.items()}
    for name, (d_out, d_in) in maps.items():
        at = f"base_model.model.model.layers.{name}"
        tensors[f"{at}.lora_A.weight"] = _random(rng, (rank, d_in))
        tensors[f"{at}.lora_B.weight"] = _random(rng, (d_out, rank))
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({"o_proj", *names})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_merged(folder: Path, base: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """Write the model of `base` with these tensors in the place of its own; return the folder."""
    shutil.copytree(base, folder)
    merged = load_file(base / "model.safetensors")
    assert tensors.keys() <= merged.keys()
    save_file(merged | dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
