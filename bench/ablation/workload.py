"""Requests of an ablation run, and adapters for them: the same for every row."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

VOCAB = 200  # token ids of the prompts, which mean nothing


@dataclasses.dataclass(frozen=True)
class Load:
    """Poisson arrivals; adapters by Zipf, prompts and answers of lognormal lengths."""

    rate: float  # requests a second
    seconds: float
    adapters: int
    zipf: float = 1.2
    prompt_tokens: int = 24  # median
    output_tokens: int = 24
    seed: int = 0


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
    popularity = np.arange(1, load.adapters + 1) ** -load.zipf
    popularity /= popularity.sum()
    found = []
    for at in arrivals[arrivals < load.seconds]:
        lengths = [
            int(np.clip(rng.lognormal(np.log(median), 0.6), 4, longest // 2))
            for median in (load.prompt_tokens, load.output_tokens)
        ]
        adapter = adapter_name(int(rng.choice(load.adapters, p=popularity)))
        prompt = rng.integers(4, VOCAB, lengths[0]).tolist()
        found.append(Job(float(at), adapter, prompt, lengths[1]))
    return found


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
