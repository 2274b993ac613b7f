"""First-token time of prompts whose KV pages are in host memory, beside computing them again.

`python -m bench.kv_offloading --out DIR`: a model of random weights with 5 million parameters on a
CPU, prompts of 1,024 tokens, device pages for two of them. Six prompts are asked in turn, again and
again, so that none finds its pages on the device. With `--kv-offloading-size` they come from the
host; without it they are computed. The two engines take turns; the tokens of both are compared.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import record
from bench.random_model import LlamaShape, llama_config
from serving import Engine, Sampling

SHAPE = LlamaShape(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    max_positions=2048,
)
LENGTHS, PROMPTS, TURNS = (1024,), 6, 3
PAGE_BYTES = SHAPE.num_layers * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 4 * 16  # float32
ONE = Sampling(max_tokens=1, temperature=0.0)


def ask_all(engine: Engine, prompts: list[list[int]]) -> tuple[list[float], list[int]]:
    """Return the milliseconds that each prompt's first token took, and the tokens."""
    taken, tokens = [], []
    for prompt in prompts:
        begun = time.perf_counter()
        answer = engine.generate(prompt, None, ONE)[0]
        taken.append(1e3 * (time.perf_counter() - begun))
        tokens += answer.outputs[0].token_ids
    return taken, tokens


def measure(length: int, folder: str) -> dict[str, Any]:
    """Return medians of both engines for prompts of one length."""
    rng = random.Random(length)
    most = SHAPE.vocab_size - 1
    prompts = [[rng.randrange(3, most) for _ in range(length + 1)] for _ in range(PROMPTS)]
    fields = {
        "load_format": "dummy",
        "dtype": "float32",
        "max_model_len": max(LENGTHS) + 16,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 256,
        "max_loras": 1,
        "structured_outputs": False,
        "kv_cache_memory_bytes": 2 * PAGE_BYTES * (max(LENGTHS) // 16 + 1),
    }
    with (
        Engine(folder, **fields) as plain,
        Engine(folder, **fields, kv_offloading_size=0.5) as offloading,
    ):
        engines = {"recompute": plain, "host": offloading}
        times: dict[str, list[float]] = {name: [] for name in engines}
        tokens: dict[str, list[list[int]]] = {name: [] for name in engines}
        # Prompts that nobody asks again push the last ones off the device.
        fillers = [[rng.randrange(3, most) for _ in range(max(LENGTHS))] for _ in range(2)]
        for turn in range(TURNS + 1):
            for name, engine in engines.items():
                taken, drawn = ask_all(engine, prompts)
                ask_all(engine, [filler[turn:] for filler in fillers])
                tokens[name].append(drawn)
                times[name] += taken if turn else []
        hits = offloading.stats().host_pages.hits
    results = {f"{name}_ms": statistics.median(each) for name, each in times.items()}
    speedup = results["recompute_ms"] / results["host_ms"]
    equal = all(drawn == tokens["recompute"][0] for each in tokens.values() for drawn in each)
    asked = TURNS * PROMPTS * length
    return {
        "prompt_tokens": length,
        **results,
        "speedup": speedup,
        "hit_share": hits / asked,
        "same_tokens": equal,
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.kv_offloading", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    args = parser.parse_args()
    about = record.about()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(llama_config(SHAPE)))
        rows = [measure(length, str(folder)) for length in LENGTHS]
    device = record.jax_device()
    result = about | {"device": device, "rows": rows}
    record.write(args.out / f"kv_offloading_{record.in_file_name(device)}.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
