"""Requests of an ablation run, and adapters for them: the same for every system."""

import csv
import dataclasses
import gzip
import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from lora_jax.config import ModelConfig

VOCAB = 200  # token ids of the prompts, which mean nothing
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

Lengths = tuple[tuple[int, int], ...]  # (prompt, answer) of real requests


@dataclasses.dataclass(frozen=True)
class Load:
    """Poisson arrivals; adapters by Zipf, prompts and answers of lognormal or given lengths."""

    rate: float  # requests a second
    seconds: float
    adapters: int
    zipf: float = 1.2
    prompt_tokens: int = 24  # median
    output_tokens: int = 24
    seed: int = 0
    lengths: Lengths = ()  # to be drawn from instead
    vocab: int = VOCAB
    prefilled: bool = False  # prompts are beginnings of their adapter's text, which may be cached


@dataclasses.dataclass(frozen=True)
class Job:
    """One request; `at` is seconds from the start."""

    at: float
    adapter: str
    prompt: list[int]
    max_tokens: int


def adapter_name(number: int) -> str:
    """Return the name of an adapter, the most popular first."""
    return f"adapter-{number}"


def jobs(load: Load, longest: int) -> list[Job]:
    """Return the requests in order of arrival; none is longer than `longest` tokens."""
    rng = np.random.default_rng(load.seed)
    arrivals = np.cumsum(rng.exponential(1 / load.rate, int(2 * load.rate * load.seconds) + 16))
    shares = popularity(load.adapters, load.zipf)
    found = []
    for at in arrivals[arrivals < load.seconds]:
        num_prompt, num_output = _lengths(load, longest, rng)
        number = int(rng.choice(load.adapters, p=shares))
        if load.prefilled:
            prompt = text_of(number, longest, load.vocab)[:num_prompt]
        else:
            prompt = rng.integers(4, load.vocab, num_prompt).tolist()
        found.append(Job(float(at), adapter_name(number), prompt, num_output))
    return found


def popularity(adapters: int, zipf: float) -> np.ndarray:
    """Return the share of the requests that each adapter gets, the first one's the largest."""
    weights = np.arange(1, adapters + 1) ** -zipf
    return weights / weights.sum()


def text_of(adapter: int, length: int, vocab: int) -> list[int]:
    """Return the first tokens of an adapter's own text."""
    return np.random.default_rng([7, adapter]).integers(4, vocab, length).tolist()


def _lengths(load: Load, longest: int, rng: np.random.Generator) -> tuple[int, int]:
    if load.lengths:
        num_prompt, num_output = load.lengths[rng.integers(len(load.lengths))]
        num_output = max(1, min(num_output, longest // 2))
        return max(1, min(num_prompt, longest - num_output)), num_output
    medians = load.prompt_tokens, load.output_tokens
    drawn = [int(np.clip(rng.lognormal(np.log(m), 0.6), 4, longest // 2)) for m in medians]
    return drawn[0], drawn[1]


def read_lengths(path: Path) -> Lengths:
    """Return the lengths in a trace of Azure's (ContextTokens, GeneratedTokens), gzipped CSV."""
    with gzip.open(path, "rt") as file:
        rows = csv.DictReader(file)
        return tuple((int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows)


def write_adapters(sources: Path, folder: Path, count: int) -> dict[str, str]:
    """Write `count` adapters, each a scaled copy of one of those in `sources`; return them."""
    originals = sorted(path for path in sources.iterdir() if path.is_dir())
    found = {}
    for number in range(count):
        source, target = originals[number % len(originals)], folder / adapter_name(number)
        target.mkdir(parents=True)
        shutil.copy(source / "adapter_config.json", target)
        tensors = load_file(source / "adapter_model.safetensors")
        scale = np.float32(1 + number / 1024)
        scaled = {k: (v.astype(np.float32) * scale).astype(v.dtype) for k, v in tensors.items()}
        save_file(scaled, target / "adapter_model.safetensors")
        found[target.name] = str(target)
    return found


def make_adapters(config: ModelConfig, folder: Path, count: int, rank: int) -> dict[str, str]:
    """Write `count` random adapters of attention and experts, bfloat16; return their folders.

    In PEFT's layout of stacked experts, in which gate and up share A. They share one file of
    matrices, of which each has its own multiple: what is read, hashed and kept of every one is what
    it would be, but the disk holds it once.
    """
    rng = np.random.default_rng(0)
    tensors = {}
    for path, shapes in _matrices(config, rank).items():
        for part, shape in zip("AB", shapes, strict=True):
            drawn = rng.standard_normal(shape, np.float32) * np.float32(0.5 * shape[1] ** -0.5)
            name = f"base_model.model.model.layers.{path}.lora_{part}.weight"
            tensors[name] = drawn.astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "matrices.safetensors", metadata={"format": "pt"})
    found = {}
    for number in range(count):
        target = folder / adapter_name(number)
        target.mkdir()
        os.link(folder / "matrices.safetensors", target / "adapter_model.safetensors")
        said = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": rank * (1 + number / 1024),
            "target_modules": [*_ATTENTION],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            "bias": "none",
        }
        (target / "adapter_config.json").write_text(json.dumps(said))
        found[target.name] = str(target)
    return found


def _matrices(config: ModelConfig, rank: int) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Return the shapes of A and B of attention's maps and of a layer's stacked experts."""
    assert config.moe is not None, "a model with experts"
    hidden, width = config.hidden_size, config.moe.intermediate_size
    heads = config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    attention = ((heads, hidden), (kv, hidden), (kv, hidden), (hidden, heads))
    experts = (("mlp.experts.base_layer", 2 * width, hidden), ("mlp.experts", hidden, width))
    rows = rank * config.moe.num_experts
    found = {}
    for layer in range(config.num_layers):
        for name, (d_out, d_in) in zip(_ATTENTION, attention, strict=True):
            found[f"{layer}.self_attn.{name}"] = (rank, d_in), (d_out, rank)
        for path, d_out, d_in in experts:
            found[f"{layer}.{path}"] = (rows, d_in), (d_out, rows)
    return found
