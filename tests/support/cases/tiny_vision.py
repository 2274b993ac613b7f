"""Tiny random checkpoints of models with a tower, their tokenizers, pictures and adapters."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file
from support.cases.tiny_checkpoint import SPECIAL, write_tokenizer

IMAGE, START, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
TOKENS = (*SPECIAL, START, END, IMAGE)
IMAGE_ID = TOKENS.index(IMAGE)
HOLDER = f"{START}{IMAGE}{END}"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    + HOLDER
    + "{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
TEXT: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 2,
}
QWEN3_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
    "initializer_range": 0.3,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MOE |= {"mlp_only_layers": [1]}
PROCESSOR = {"min_pixels": 64, "max_pixels": 4096}  # 1 to 64 tokens of 8 x 8 pixels


def make_qwen3_vl(*, moe: bool = False) -> Any:
    """Return transformers' Qwen3-VL, or Qwen3-VL-MoE, with random weights."""
    import transformers
    from support.contracts.model_contract import shaken

    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}
    kind = "Qwen3VLMoe" if moe else "Qwen3VL"
    text = {**TEXT, "rope_parameters": {**rope, "mrope_interleaved": True}}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text | MOE if moe else text,
        vision_config=QWEN3_TOWER,
        image_token_id=IMAGE_ID,
        vision_start_token_id=TOKENS.index(START),
        vision_end_token_id=TOKENS.index(END),
        video_token_id=263,
    )
    transformers.set_seed(0)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")
    return shaken(model(config)).eval()


def write_qwen3_vl(folder: Path, *, moe: bool = False) -> Any:
    """Write the checkpoint with tokenizer and processor; return transformers' model."""
    from support.drivers.model_driver import save_oracle

    oracle = make_qwen3_vl(moe=moe)
    save_oracle(oracle, folder)
    write_tokenizer(folder, TOKENS, TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return oracle


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return a random RGB image, uint8 [height, width, 3], of coarse spots."""
    rng = np.random.default_rng(seed)
    spots = rng.integers(0, 256, (-(-height // 8), -(-width // 8), 3), np.uint8)
    return np.repeat(np.repeat(spots, 8, 0), 8, 1)[:height, :width].copy()


def png(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """Return a file of the pixels."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **options)
    return out.getvalue()


def write_vision_adapter(folder: Path, seed: int, *, tower: bool, rank: int = 4) -> None:
    """Write a PEFT LoRA on q and v of the text layers, and, with `tower`, on the tower."""
    rng, shapes = np.random.default_rng(seed), {}
    for layer in range(TEXT["num_hidden_layers"]):
        at = f"model.language_model.layers.{layer}.self_attn"
        shapes |= {f"{at}.q_proj": (64, 32), f"{at}.v_proj": (32, 32)}
    if tower:
        for layer in range(QWEN3_TOWER["depth"]):
            shapes[f"model.visual.blocks.{layer}.attn.qkv"] = (96, 32)
        shapes["model.visual.merger.linear_fc2"] = (32, 128)
    tensors = {}
    for path, (d_out, d_in) in shapes.items():
        a = (rng.standard_normal((rank, d_in)) * d_in**-0.5).astype("f4")
        b = rng.standard_normal((d_out, rank)).astype("f4")
        tensors[f"base_model.model.{path}.lora_A.weight"] = a
        tensors[f"base_model.model.{path}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted({path.split(".")[-1] for path in shapes}),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def write_vision_esft(
    folder: Path, experts: Mapping[int, Sequence[int]], seed: int
) -> dict[tuple[int, int], list[np.ndarray]]:
    """Write an ESFT adapter of Qwen3-VL-MoE; return gate, up and down by (layer, expert)."""
    rng, hidden = np.random.default_rng(seed), TEXT["hidden_size"]
    width, tensors, made = MOE["moe_intermediate_size"], {}, {}
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden)}
    shapes["down_proj"] = (hidden, width)
    for layer, ids in experts.items():
        for expert in ids:
            at = f"model.language_model.layers.{layer}.mlp.experts.{expert}"
            new = {name: _random(rng, shape) for name, shape in shapes.items()}
            tensors |= {f"{at}.{name}.weight": matrix for name, matrix in new.items()}
            made[layer, expert] = list(new.values())
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "experts.safetensors", metadata={"format": "pt"})
    config = {"experts": {str(layer): list(ids) for layer, ids in experts.items()}}
    (folder / "expert_cfg.json").write_text(json.dumps(config))
    return made


def _random(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return (2 * rng.standard_normal(shape) * shape[1] ** -0.5).astype("f4")
