"""Folders of Qwen3-VL's real shapes without weights, and adapters of random ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lora_jax.adapters.task_head import HeadKind, TaskHead
from lora_jax.finetune.head_export import add_head
from lora_jax.finetune.lora_params import LoraSpec, init_lora
from lora_jax.finetune.peft_export import save_adapter
from lora_jax.models import model_class
from lora_jax.models.loader import read_config

TINY = Path(__file__).parents[2] / "assets" / "tiny-vl"
TURN = "<|im_start|>user\n{}{}<|im_end|>\n<|im_start|>assistant\n"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SIDES = (1080, 1920)  # pixels of a full frame: 2,040 tokens

TEXT: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_theta": 5e6,
    "rope_scaling": {
        "rope_type": "default",
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
    "eos_token_id": [2, 0],
    "tie_word_embeddings": False,
}
TEXTS: dict[str, dict[str, Any]] = {
    "qwen3-vl-8b": {
        "model_type": "qwen3_vl_text",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
    },
    "qwen3-vl-30b-a3b": {
        "model_type": "qwen3_vl_moe_text",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 65536,
    "max_pixels": 16777216,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}


def write_shape(folder: Path, name: str, **text: Any) -> Path:
    """Write config, processor and the tokenizer of tiny-vl; `text` replaces sizes (for tests)."""
    sizes = TEXT | TEXTS[name] | text
    family = sizes["model_type"].removesuffix("_text")
    tiny = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    tokens = ("vision_start_token_id", "vision_end_token_id", "image_token_id")
    config = {
        "model_type": family,
        "text_config": sizes,
        "vision_config": VISION | {"model_type": family, "out_hidden_size": sizes["hidden_size"]},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **{token: tiny[token] for token in tokens},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / file, folder / file)
    return folder


def write_headed(folder: Path, model: Path, rank: int, labels: int) -> Path:
    """Write LoRA on the attention maps and a class head, all of random or no effect."""
    config = read_config(model)
    catalogue = model_class(config.model_type).catalogue(config)
    spec = LoraSpec(rank, 2.0 * rank, ATTENTION)
    lora = init_lora(spec, catalogue, 1)
    dtype = np.dtype(jnp.bfloat16)
    save_adapter(folder, lora, spec, catalogue, base_name=model.name, dtype=dtype)
    weight = np.random.default_rng(0).standard_normal((labels, config.hidden_size)) * 0.02
    head = TaskHead(HeadKind.CLASS, tuple(f"label {n}" for n in range(labels)))
    add_head(folder, head, weight, np.zeros(labels), dtype)
    return folder


def frame(seed: int, sides: tuple[int, int] = SIDES) -> np.ndarray:
    """Return a random image, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (*sides, 3), np.uint8)


def tower_flops(patches: int, out: int) -> float:
    """Return the multiplications and additions of the tower's products for one image."""
    size, width = VISION["hidden_size"], VISION["intermediate_size"]
    merged, cells = 4 * size, patches // 4
    block = patches * (4 * size**2 + 2 * size * width) + 2 * patches**2 * size
    mergers = (1 + len(VISION["deepstack_visual_indexes"])) * cells * (merged**2 + merged * out)
    embedding = patches * 2 * 3 * VISION["patch_size"] ** 2 * size
    return 2.0 * (VISION["depth"] * block + mergers + embedding)
