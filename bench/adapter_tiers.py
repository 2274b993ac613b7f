"""Throughput of many adapters by Zipf, beside that of one: what moving between tiers costs.

`python -m bench.adapter_tiers --out DIR`: the shipped model on a CPU, copies of a shipped adapter
of its own digest each, 30 on the device, 300 on the host, the rest on the disk. Requests of 32
tokens are handed in at once. Rounds of one adapter and of all take turns; figures are medians.
"""

import argparse
import dataclasses
import json
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from serving import Engine, Sampling

MODEL = Path("assets/tiny-moe")
ADAPTER = MODEL / "adapters" / "intent"
SAMPLING = Sampling(max_tokens=32, temperature=0.0, ignore_eos=True)
SIZES = {"max_num_seqs": 16, "max_num_batched_tokens": 128, "max_queue": 4096}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a run."""

    adapters: int = 1000
    on_device: int = 30
    on_host: int = 300
    requests: int = 400
    rounds: int = 3
    zipf: float = 1.0


def write_adapters(folder: Path, count: int) -> list[str]:
    """Write copies of the shipped adapter that differ in their digests; return their names."""
    tensors = load_file(ADAPTER / "adapter_model.safetensors")
    names = [f"a{number}" for number in range(count)]
    for name in names:
        (folder / name).mkdir(parents=True)
        shutil.copy(ADAPTER / "adapter_config.json", folder / name)
        save_file(tensors, folder / name / "adapter_model.safetensors", metadata={"name": name})
    return names


def measure(case: Case) -> dict:
    """Return tokens per second of one adapter and of all, and where requests found theirs."""
    rng, speeds = random.Random(1), {"one": [], "all": []}
    with tempfile.TemporaryDirectory() as place:
        names = write_adapters(Path(place), case.adapters)
        weights = [(rank + 1) ** -case.zipf for rank in range(case.adapters)]
        tiers: dict[str, Any] = {"max_loras": case.on_device, "max_cpu_loras": case.on_host}
        tiers |= {"lora_dir": place, "max_adapter_loads_per_minute": 1_000_000}
        with Engine(MODEL, **SIZES, **tiers) as engine:
            prompts = [engine.tokenizer.encode(f"request {n}") for n in range(case.requests)]
            for turn in range(case.rounds + 1):  # the first warms up
                for kind in ("one", "all"):
                    asked = [names[0]] * case.requests
                    if kind == "all":
                        asked = rng.choices(names, weights, k=case.requests)
                    begun = time.perf_counter()
                    engine.generate(prompts, asked, SAMPLING)
                    if turn:
                        tokens = case.requests * SAMPLING.max_tokens
                        speeds[kind].append(tokens / (time.perf_counter() - begun))
            sample = engine.metrics.registry.get_sample_value
            hits = {
                tier: sample("lora_jax:adapter_tier_hits_total", {"tier": tier})
                for tier in ("device", "host", "disk")
            }
    medians = {kind: statistics.median(results) for kind, results in speeds.items()}
    ratio = medians["all"] / medians["one"]
    return {**dataclasses.asdict(case), "tokens_per_s": medians, "ratio": ratio, "hits": hits}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--adapters", type=int, default=Case.adapters)
    parser.add_argument("--requests", type=int, default=Case.requests)
    given = parser.parse_args()
    results = measure(Case(adapters=given.adapters, requests=given.requests))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "adapter_tiers.json").write_text(json.dumps(results, indent=1))
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
