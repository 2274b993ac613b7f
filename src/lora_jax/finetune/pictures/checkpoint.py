"""The folder of a Qwen3-VL that was trained here: weights, tokenizer, image processor."""

import json
import pathlib
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken

from lora_jax.finetune.assets import tokenizer
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.nn.layers import LayerNorm, Linear
from lora_jax.typing import Array

START, END, PAD = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
IMAGE = START + PAD + END
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    + IMAGE
    + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save_tokenizer(texts: Iterable[str], vocab_size: int, folder: pathlib.Path, most: int) -> int:
    """Write a tokenizer whose last three tokens are those of images; return the first's id.

    Raises ValueError when the texts are too small for so many tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    bpe = tokenizer.train_bpe(texts, vocab_size - 3)
    bpe.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in (START, END, PAD)]
    )
    tokenizer.save(bpe, folder, most)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": CHAT_TEMPLATE}
    _write(path, config)
    return vocab_size - 3


def save_model(model: AbstractCausalLM, raw: dict[str, Any], folder: pathlib.Path) -> None:
    """Write config.json, generation_config.json and model.safetensors in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(np.asarray(value).astype(ml_dtypes.bfloat16))
        for name, value in (text_tensors(model) | tower_tensors(model)).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = raw["text_config"]
    _write(folder / "config.json", raw)
    generation = {key: text[key] for key in ("eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", generation)


def _write(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def text_tensors(model: AbstractCausalLM) -> dict[str, Array]:
    """Return the language model's weights, its head tied, by their names in checkpoints."""
    at = "model.language_model."
    tensors = {
        f"{at}embed_tokens.weight": model.embed.weight[...],
        f"{at}norm.weight": model.norm.weight[...],
    }
    for number, layer in enumerate(model.layers):
        prefix = f"{at}layers.{number}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = getattr(layer.attn, name).weight[...]
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{prefix}mlp.{name}.weight"] = getattr(layer.mlp, name).weight[...]
        tensors[f"{prefix}input_layernorm.weight"] = layer.input_norm.weight[...]
        tensors[f"{prefix}post_attention_layernorm.weight"] = layer.post_norm.weight[...]
    return tensors


def tower_tensors(model: Any) -> dict[str, Array]:
    """Return the tower's weights by their names in checkpoints."""
    tower, at = model.tower, "model.visual."
    config = tower.config
    size = config.patch_size
    kernel = (-1, 3, config.temporal_patch_size, size, size)
    tensors = {
        f"{at}pos_embed.weight": tower.positions[...],
        f"{at}patch_embed.proj.weight": tower.patch_embed.weight[...].reshape(kernel),
        f"{at}patch_embed.proj.bias": tower.patch_embed.bias[...],
    }
    for number, block in enumerate(tower.blocks):
        prefix = f"{at}blocks.{number}."
        parts = {"attn.qkv": block.attn.qkv, "attn.proj": block.attn.proj}
        parts |= {f"mlp.{name}": getattr(block, name) for name in ("linear_fc1", "linear_fc2")}
        parts |= {"norm1": block.norm1, "norm2": block.norm2}
        tensors |= _pairs(prefix, parts)
    mergers = {"merger.": tower.merger}
    mergers |= {f"deepstack_merger_list.{n}.": m for n, m in enumerate(tower.deepstack)}
    for name, merger in mergers.items():
        parts = {part: getattr(merger, part) for part in ("norm", "linear_fc1", "linear_fc2")}
        tensors |= _pairs(at + name, parts)
    return tensors


def _pairs(prefix: str, parts: dict[str, Linear | LayerNorm]) -> dict[str, Array]:
    kinds = ("weight", "bias")
    return {f"{prefix}{n}.{k}": getattr(part, k)[...] for n, part in parts.items() for k in kinds}
