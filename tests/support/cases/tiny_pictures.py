"""Random pictures as sources of scenes, and a tiny Qwen3-VL folder to train on them."""

import copy
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from support.cases.tiny_checkpoint import SPECIAL, write_tokenizer

from lora_jax.config import from_hf
from lora_jax.finetune.pictures import checkpoint
from lora_jax.finetune.pictures.collect import KINDS, Pictures
from lora_jax.finetune.pictures.make_base import CONFIG, PROCESSOR
from lora_jax.models import build

TOKENS = (*SPECIAL, checkpoint.START, checkpoint.END, checkpoint.PAD)
TEXT = {
    **{"vocab_size": 264, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": 2},
    **{"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2]}},
}
TOWER = {
    **{"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2},
    **{"out_hidden_size": 32, "patch_size": 16, "deepstack_visual_indexes": [0]},
}


def write_folder(folder: Path) -> Path:
    """Write a model of random weights whose images are 64 x 64 pixels and 4 tokens."""
    raw: dict[str, Any] = copy.deepcopy(CONFIG)
    raw["text_config"] |= TEXT
    raw["text_config"]["rope_scaling"]["mrope_interleaved"] = True
    raw["vision_config"] |= TOWER
    raw |= {"vision_start_token_id": 4, "vision_end_token_id": 5, "image_token_id": 6}
    model = build(from_hf(raw), jnp.float32, nnx.Rngs(0))
    checkpoint.save_model(model, raw, folder)
    write_tokenizer(folder, TOKENS, checkpoint.CHAT_TEMPLATE)
    processor = {**PROCESSOR, "patch_size": 16}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def sources() -> dict[str, Pictures]:
    """Return a few random pictures of each source."""
    rng, kinds = np.random.default_rng(0), np.array(list(KINDS) * 4)
    count = len(kinds)
    names = np.array([f"{kind} {n}" for n, kind in enumerate(kinds)])
    colours = rng.integers(0, 256, (count, 48, 48, 4), np.uint8)
    grey = rng.integers(0, 256, (count, 8, 8, 1), np.uint8)
    heldout, none = np.arange(count) >= count // 2, np.full(count, "")
    digits = np.array([str(n % 3) for n in range(count)])
    return {
        "emoji": Pictures(colours, names, heldout, kinds),
        "flags": Pictures(colours, names, np.full(count, False), none),
        "digits": Pictures(grey, digits, heldout, none),
        "clothes": Pictures(grey, digits, heldout, none),
    }
