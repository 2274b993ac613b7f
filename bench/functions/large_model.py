"""A bfloat16 checkpoint of a large Llama shape, written as fast as its bytes are: one random block
stands, shifted, for all matrices. Answers mean nothing, times and bytes are the shape's."""

import dataclasses
import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bench.random_model import LlamaShape, llama_config, write_adapter

_BLOCK = (1 << 24) + 12289  # numbers; no multiple of a row, so that rows differ
SHAPES = {
    "llama-2-7b": LlamaShape(32000, 4096, 11008, 32, 32, 32, 4096),
    "small": LlamaShape(512, 64, 128, 2, 4, 2, 1024),
}


def write_large(folder: Path, shape: LlamaShape) -> None:
    """Write config, tokenizer and a file of weights per layer."""
    block = np.random.default_rng(0).standard_normal(_BLOCK, dtype=np.float32)
    block = block.astype(ml_dtypes.bfloat16)
    taken = 0

    def normal(*dims: int) -> np.ndarray:
        nonlocal taken
        count, scale = int(np.prod(dims)), ml_dtypes.bfloat16(2.0 ** -round(np.log2(dims[-1]) / 2))
        taken = (taken + 7919) % _BLOCK
        part = np.concatenate([block[taken:], block[:taken]]) if taken else block
        return (np.resize(part, count) * scale).reshape(dims)

    folder.mkdir(parents=True, exist_ok=True)
    ones = np.ones(shape.hidden_size, ml_dtypes.bfloat16)
    rest = {
        "model.embed_tokens.weight": normal(shape.vocab_size, shape.hidden_size),
        "lm_head.weight": normal(shape.vocab_size, shape.hidden_size),
        "model.norm.weight": ones,
    }
    parts = [rest]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}{n}_layernorm.weight": ones for n in ("input", "post_attention")}
        tensors |= {f"{prefix}{n}.weight": normal(*dims) for n, dims in shape.linears().items()}
        parts.append(tensors)
        if len(parts) > 1:
            _save(folder, layer, parts.pop())
    _save(folder, shape.num_layers, parts.pop())
    index = {name: file for file, names in _names(folder).items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = llama_config(shape) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(shape.vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def _save(folder: Path, number: int, tensors: dict[str, np.ndarray]) -> None:
    file = folder / f"part-{number:03}.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / f"part-{number:03}.names").write_text(json.dumps(sorted(tensors)))


def _names(folder: Path) -> dict[str, list[str]]:
    found = {}
    for file in sorted(folder.glob("part-*.names")):
        found[f"{file.stem}.safetensors"] = json.loads(file.read_text())
        file.unlink()
    return found


def write_adapters(folder: Path, shape: LlamaShape, count: int) -> list[Path]:
    """Write adapters of rank 16 on the attention's maps: the first, and others by its scaling."""
    made = []
    for number in range(count):
        one = folder / f"f{number}"
        if number:
            one.mkdir(parents=True)
            (one / "adapter_model.safetensors").hardlink_to(made[0] / "adapter_model.safetensors")
            config = json.loads((made[0] / "adapter_config.json").read_text())
            config["lora_alpha"] *= 1 + number / 4
            (one / "adapter_config.json").write_text(json.dumps(config))
        else:
            write_adapter(one, dataclasses.replace(shape), 16, seed=1)
        made.append(one)
    return made
