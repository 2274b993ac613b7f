"""Decoding on a CPU with a base in 16, 8 and 4 bits: output tokens a second.

`python -m bench.quantised --out DIR` writes a Llama-shaped random model of 125 million parameters
(bench.random_model) and its quantised copies, and lets the engine answer 1 and 8 requests of 4
tokens with 60 each, greedy and without adapters. Engines take turns; a figure is the median of the
turns, the short prompt included.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import record
from bench.random_model import LlamaShape, write_llama
from lora_jax.quantize import quantize
from serving import Engine, Sampling

FORMATS = ("int4", "nf4", "fp8")
WITH_HEAD = ("int4", "nf4")  # also written with a head in that format
PROMPT, ANSWER = 4, 60
REQUESTS = (1, 8)


def engine_of(folder: Path) -> Engine:
    """Return an engine without adapters, in bfloat16."""
    sizes: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 8}
    return Engine(str(folder), dtype="bfloat16", kv_cache_memory_bytes=64 << 20, **sizes)


def rate(engine: Engine, requests: int) -> float:
    """Return output tokens a second of so many equal requests at once."""
    prompts = [[3 + i + 8 * r for i in range(PROMPT)] for r in range(requests)]
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    engine.generate(prompts, None, sampling)
    return requests * ANSWER / (time.perf_counter() - start)


def measure(turns: int) -> list[dict]:
    """Return a row for each number of requests and format."""
    with tempfile.TemporaryDirectory() as tmp, contextlib.ExitStack() as running:
        root = Path(tmp)
        write_llama(root / "bfloat16", LlamaShape())
        for name in FORMATS:
            quantize(root / "bfloat16", name, root / name)
        for name in WITH_HEAD:
            quantize(root / "bfloat16", name, root / f"{name}-head", quant_lm_head=True)
        names = ("bfloat16", *FORMATS, *(f"{name}-head" for name in WITH_HEAD))
        engines = {name: running.enter_context(engine_of(root / name)) for name in names}
        rates: dict[tuple[int, str], list[float]] = {}
        for turn in range(turns + 1):
            for requests in REQUESTS:
                for name, engine in engines.items():
                    results = rate(engine, requests)
                    if turn:  # the first one warms up
                        rates.setdefault((requests, name), []).append(results)
        bytes_of = {name: engine.model_info.weight_bytes for name, engine in engines.items()}
    medians = {key: statistics.median(values) for key, values in rates.items()}
    return [
        {
            "requests": requests,
            "base": name,
            "weight_mb": round(bytes_of[name] / 1e6, 1),
            "tokens_per_s": round(value, 1),
            "over_bfloat16": round(value / medians[requests, "bfloat16"], 2),
        }
        for (requests, name), value in medians.items()
    ]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.quantised", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of quantised_cpu.json")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    about = record.about()
    rows = measure(args.turns)
    record.write(args.out / "quantised_cpu.json", about | {"rows": rows})
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
