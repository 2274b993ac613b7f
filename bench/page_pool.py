"""A workload that shifts between adapters and long contexts: one page pool against fixed shares.

`python -m bench.page_pool --out DIR`: a Llama of random weights with 5 million parameters on a CPU,
60 MiB for KV pages and adapters. Three phases come one after the other, several times:

    adapters   160 short requests over 48 adapters of rank 16 (57 MB)
    long       72 questions about 16 documents of 768 tokens (48 MB of KV)
    both       both kinds, over half of the adapters and half of the documents

Engines with fixed shares of the same bytes get them too. Of those the best is the one that takes
least time over all phases. Times are processor seconds of the process, for the machine may have
other work; a phase counts with its own transition.
"""

import argparse
import datetime
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from bench.random_model import LlamaShape, write_adapter, write_llama
from serving import Engine, Sampling

SHAPE = LlamaShape(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=704,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    max_positions=1024,
)
BUDGET = 60 << 20
SHARES = (0.2, 0.35, 0.5, 0.65, 0.8)  # of adapters, in engines with fixed ones
ADAPTERS, DOCUMENTS, TOKENS, RANK = 48, 16, 768, 16
PHASES = {"adapters": (160, 0), "long": (0, 72), "both": (80, 36)}  # requests of each kind
ANSWER = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
FIELDS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_loras": 64,
    "max_lora_rank": RANK,
    "max_queue": 4096,
    "structured_outputs": False,
}


def requests(phase: str, rng: random.Random) -> list[tuple[list[int], str | None]]:
    """Return prompts and adapters of a phase, in a random order."""
    short, long = PHASES[phase]
    parts = 2 if phase == "both" else 1
    asked: list[tuple[list[int], str | None]] = []
    for _ in range(short):
        prompt = [rng.randrange(3, SHAPE.vocab_size - 1) for _ in range(8)]
        asked.append((prompt, f"a{rng.randrange(ADAPTERS // parts)}"))
    for _ in range(long):
        words = random.Random(rng.randrange(DOCUMENTS // parts))
        document = [words.randrange(3, SHAPE.vocab_size - 1) for _ in range(TOKENS)]
        asked.append((document + [rng.randrange(3, 4000) for _ in range(8)], None))
    rng.shuffle(asked)
    return asked


def run(engine: Engine, rounds: int) -> dict[str, Any]:
    """Return seconds of each phase and round, and what the engine answered."""
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    walls: dict[str, list[float]] = {phase: [] for phase in PHASES}
    answers, failed = [], 0
    for number in range(rounds + 1):  # the first round fills and is not counted
        for phase in PHASES:
            asked = requests(phase, random.Random(f"{number} {phase}"))
            prompts, adapters = (list(each) for each in zip(*asked, strict=True))
            begun, wall = time.process_time(), time.perf_counter()
            outputs = engine.generate(prompts, adapters, [ANSWER] * len(asked))
            if number:
                seconds[phase].append(time.process_time() - begun)
                walls[phase].append(time.perf_counter() - wall)
            tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
            failed += sum(len(each) != ANSWER.max_tokens for each in tokens)
            answers.append(tokens)
    stats = engine.stats()
    return {
        "seconds": seconds,
        "wall": walls,
        "failed": failed,
        "loads": stats.adapter_swaps,
        "prefix_hit_rate": stats.prefix_hit_rate,
        "preemptions": stats.preemptions,
        "steps": stats.steps,
        "given": stats.pool.given,
        "answers": hash(tuple(map(tuple, answers))),
    }


def measure(folder: Path, rounds: int, shares: Sequence[float]) -> dict[str, Any]:
    """Return what each engine gave, by its name."""
    write_llama(folder / "model", SHAPE)
    adapters = {}
    for number in range(ADAPTERS):
        write_adapter(folder / f"a{number}", SHAPE, RANK, seed=number)
        adapters[f"a{number}"] = str(folder / f"a{number}")
    sizes: dict[str, dict[str, Any]] = {"pool": {"page_pool_bytes": BUDGET}}
    for share in shares:
        lora = int(BUDGET * share)
        sizes[f"{share:.0%}"] = {
            "lora_memory_bytes": lora,
            "kv_cache_memory_bytes": BUDGET - lora,
        }
    found = {}
    for name, fields in sizes.items():
        with Engine(str(folder / "model"), adapters, **FIELDS, **fields) as engine:
            found[name] = run(engine, rounds)
        print(name, {p: [round(s, 2) for s in t] for p, t in found[name]["seconds"].items()})
    return found


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Return tokens a second of each engine and phase, and the pool's against the best share."""
    rates: dict[str, dict[str, float]] = {}
    for name, one in found.items():
        rates[name] = {
            phase: sum(PHASES[phase]) * ANSWER.max_tokens / statistics.median(seconds)
            for phase, seconds in one["seconds"].items()
        }
    total = {
        name: sum(statistics.median(s) for s in one["seconds"].values())
        for name, one in found.items()
    }
    best = min((name for name in found if name != "pool"), key=lambda name: total[name])
    ratios = {phase: rates["pool"][phase] / rates[best][phase] for phase in PHASES}
    return {
        "tokens_per_processor_s": rates,
        "seconds_of_all_phases": total,
        "best_share": best,
        "pool_to_best_share": ratios,
        "in_its_worst_phase": max(ratios.values()),
        "failed": {name: one["failed"] for name, one in found.items()},
        "same_answers": len({one["answers"] for one in found.values()}) == 1,
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    args = parser.parse_args()
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as place:
        found = measure(Path(place), args.rounds, args.shares)
    device = jax.devices()[0].device_kind.replace(" ", "_").lower()
    result = {
        "device": device,
        "cores": os.cpu_count(),
        "load_average_before": before,
        "date": datetime.date.today().isoformat(),
        "bytes": BUDGET,
        "summary": summary(found),
        "engines": found,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"page_pool_{device}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
