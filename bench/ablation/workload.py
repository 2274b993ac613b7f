"""Requests of an ablation run, and adapters for them: the same for every system."""

import csv
import dataclasses
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

VOCAB = 200  # token ids of the prompts, which mean nothing
_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

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
    prepared = []
    for at in arrivals[arrivals < load.seconds]:
        num_prompt, num_output = _lengths(load, longest, rng)
        number = int(rng.choice(load.adapters, p=shares))
        prompt = rng.integers(4, load.vocab, num_prompt).tolist()
        prepared.append(Job(float(at), adapter_name(number), prompt, num_output))
    return prepared


def popularity(adapters: int, zipf: float) -> np.ndarray:
    """Return the share of the requests that each adapter gets, the first one's the largest."""
    weights = np.arange(1, adapters + 1) ** -zipf
    return weights / weights.sum()


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
    results = {}
    for number in range(count):
        source, target = originals[number % len(originals)], folder / adapter_name(number)
        target.mkdir(parents=True)
        shutil.copy(source / "adapter_config.json", target)
        tensors = load_file(source / "adapter_model.safetensors")
        scale = np.float32(1 + number / 1024)
        scaled = {k: (v.astype(np.float32) * scale).astype(v.dtype) for k, v in tensors.items()}
        save_file(scaled, target / "adapter_model.safetensors")
        results[target.name] = str(target)
    return results


def make_adapters(folder: Path, count: int, rank: int) -> dict[str, str]:
    """Write the configs of `count` adapters on attention and experts; return their folders.

    Under load_format "dummy" their matrices are random (lora_jax.adapters.dummy).
    """
    results = {}
    for number in range(count):
        target = folder / adapter_name(number)
        target.mkdir(parents=True)
        alpha = rank * (1 + number / 1024)  # or all would be one adapter
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": _TARGETS}
        (target / "adapter_config.json").write_text(json.dumps(config))
        results[target.name] = str(target)
    return results
