"""A bfloat16 checkpoint of a large Llama shape, written as fast as its bytes are: one random block
stands, shifted, for all matrices. Answers mean nothing, times and bytes are the shape's."""

import functools
import json
import math
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bench.random_model import LlamaShape, llama_config, write_adapter

_SPARE = 1 << 20  # numbers by which the starts of matrices in the block differ
_WRITING = 8  # files at a time
SHAPES = {
    "llama-2-7b": LlamaShape(32000, 4096, 11008, 32, 32, 32, 4096),
    "small": LlamaShape(512, 64, 128, 2, 4, 2, 1024),
}


def write_large(folder: Path, shape: LlamaShape) -> None:
    """Write config, tokenizer and a file of weights per layer."""
    folder.mkdir(parents=True, exist_ok=True)
    ones = np.ones(shape.hidden_size, ml_dtypes.bfloat16)
    rest = {
        "model.embed_tokens.weight": (shape.vocab_size, shape.hidden_size),
        "lm_head.weight": (shape.vocab_size, shape.hidden_size),
    }
    parts = [rest]
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        parts.append({f"{prefix}{n}.weight": dims for n, dims in shape.linears().items()})
    largest = max(math.prod(dims) for part in parts[:2] for dims in part.values())
    blocks = {
        d_in: _block(largest + _SPARE, d_in) for part in parts[:2] for _, d_in in part.values()
    }

    def save(number: int) -> dict[str, str]:
        tensors = {}
        for place, (name, dims) in enumerate(parts[number].items()):
            start = (number * 7919 + place * 104729) % _SPARE
            tensors[name] = blocks[dims[1]][start : start + math.prod(dims)].reshape(dims)
        if number:
            norms = ("input_layernorm", "post_attention_layernorm")
            tensors |= {f"model.layers.{number - 1}.{norm}.weight": ones for norm in norms}
        else:
            tensors["model.norm.weight"] = ones
        file = f"part-{number:03}.safetensors"
        _save(tensors, folder / file)
        return dict.fromkeys(tensors, file)

    with ThreadPoolExecutor(_WRITING) as pool:
        index = {
            name: file
            for names in pool.map(save, range(len(parts)))
            for name, file in names.items()
        }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = llama_config(shape) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{i}": i for i in range(shape.vocab_size)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def _save(tensors: dict[str, np.ndarray], path: Path) -> None:
    """Write bfloat16 arrays as safetensors without a copy, and outside Python's lock."""
    header, end = {}, 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": "BF16", "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            left = memoryview(array.reshape(-1).view(np.uint8))
            while left:  # one call of the system writes 2 GiB at most
                left = left[file.write(left) :]


@functools.cache
def _block(count: int, d_in: int) -> np.ndarray:
    """Return random numbers of the size that a map of so many inputs has."""
    few = np.random.default_rng(0).standard_normal((1 << 20) + 12289, dtype=np.float32)
    return np.resize((few * d_in**-0.5).astype(ml_dtypes.bfloat16), count)


def write_adapters(
    folder: Path, shape: LlamaShape, count: int, only: Collection[str] = ()
) -> list[Path]:
    """Write adapters of rank 16: the first, and others by its scaling.

    They are on the maps of these names alone; none: on all maps.
    """
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
            write_adapter(one, shape, 16, seed=1, only=only)
        made.append(one)
    return made
