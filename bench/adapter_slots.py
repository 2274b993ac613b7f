"""First-token times of more adapters than the device has slots for, at 70% of its load.

`python -m bench.adapter_slots --out DIR`: the shipped model on a CPU, 16 rows and 16 slots, 16, 32,
64 and 128 adapters of the same bytes that requests name at random, each as often. Requests come at
random times (Poisson) at 70% of the rate at which the engine answers 16 resident adapters. A *hit*
is a request whose adapter is on the device when it comes. Populations take turns, with the same
times of a turn, so that all meet the same bursts and the same noise of the machine. Percentiles are
of all turns together; a ratio to the resident ones is the median of those of the turns.
"""

import argparse
import dataclasses
import json
import queue
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import record
from bench.adapter_tiers import MODEL, write_adapters
from serving import Engine, Sampling
from serving.api.request import OutputDelta
from serving.engine.loop.pacing import SWITCH_S
from serving.runtime.garbage import rare_collections

SLOTS = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a run."""

    ratios: tuple[int, ...] = (1, 2, 4, 8)  # adapters to slots
    load: float = 0.7
    requests: int = 400  # of a population in one turn
    turns: int = 3
    prompt: int = 16  # tokens
    answer: int = 16


@dataclasses.dataclass
class Asked:
    """One request: where its adapter was, and how long its first token took."""

    hit: bool
    begun: float
    ended: queue.SimpleQueue
    first: float | None = None

    def __call__(self, delta: OutputDelta) -> None:
        if self.first is None:
            self.first = time.perf_counter() - self.begun
        if delta.finish_reason is not None:
            self.ended.put(delta.error)


def send(engine: Engine, names: list[str], gaps: list[float], case: Case) -> list[Asked]:
    """Send one request per name, each so many seconds after the one before; wait for all."""
    sampling = Sampling(max_tokens=case.answer, temperature=0.0, ignore_eos=True)
    ended: queue.SimpleQueue = queue.SimpleQueue()
    rng, most = random.Random(len(names)), engine.model_info.vocab_size - 1
    prompts = [[rng.randrange(3, most) for _ in range(case.prompt)] for _ in names]
    asked, due = [], time.perf_counter()
    for prompt, name, gap in zip(prompts, names, gaps, strict=True):
        due += gap
        time.sleep(max(0.0, due - time.perf_counter()))
        hit = name in engine.stats().resident_adapters
        asked.append(Asked(hit, time.perf_counter(), ended))
        engine.submit(prompt, name, sampling, on_output=asked[-1])
    failed = [error for _ in asked if (error := ended.get()) is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return asked


def capacity(engine: Engine, names: list[str], case: Case) -> float:
    """Return requests per second that the engine answers when all are there at once."""
    names = [names[n % len(names)] for n in range(case.requests)]
    begun = time.perf_counter()
    send(engine, names, [0.0] * len(names), case)
    return len(names) / (time.perf_counter() - begun)


def summary(asked: list[Asked]) -> dict[str, float]:
    """Return percentiles of the first token's time in milliseconds."""
    every = np.array([one.first for one in asked]) * 1e3
    hits = every[[one.hit for one in asked]]
    return {
        "requests": len(asked),
        "hit_share": len(hits) / len(asked),
        "p50_ms": float(np.percentile(every, 50)),
        "p99_ms": float(np.percentile(every, 99)),
        "hits_p50_ms": float(np.percentile(hits, 50)),
        "hits_p99_ms": float(np.percentile(hits, 99)),
    }


def measure(engine: Engine, names: list[str], slots: int, case: Case) -> dict[str, Any]:
    """Return the figures of each ratio; the engine must know the names, and have room for all."""
    rng = random.Random(1)
    results: dict[int, list[Asked]] = {ratio: [] for ratio in case.ratios}
    names, resident = names[: slots * max(case.ratios)], names[:slots]
    send(engine, names, [0.0] * len(names), case)  # reads all files
    capacity(engine, resident, case)
    rate = case.load * capacity(engine, resident, case)
    turns: list[dict[str, dict[str, float]]] = []
    for _ in range(case.turns):
        gaps, turn = [rng.expovariate(rate) for _ in range(case.requests)], {}
        for ratio in case.ratios:
            send(engine, resident, [0.0] * slots, case)
            chosen = rng.choices(names[: slots * ratio], k=case.requests)
            asked = send(engine, chosen, gaps, case)
            results[ratio] += asked
            turn[str(ratio)] = summary(asked)
        turns.append(turn)
    rows = {str(ratio): summary(asked) for ratio, asked in results.items()}
    first = str(min(case.ratios))
    for ratio, row in rows.items():
        for of in ("p99_ms", "hits_p99_ms"):
            of_turns = [turn[ratio][of] / turn[first]["p99_ms"] for turn in turns]
            row[of.replace("_ms", "_of_resident")] = statistics.median(of_turns)
    figures = {"requests_per_s": rate, "slots": slots, "by_ratio": rows, "by_turn": turns}
    return {**dataclasses.asdict(case), **figures}


def on_shipped_model(case: Case) -> dict[str, Any]:
    """Return the figures of the shipped model."""
    sys.setswitchinterval(SWITCH_S)  # as in a server
    sizes = {"max_num_seqs": SLOTS, "max_loras": SLOTS, "max_num_batched_tokens": 128}
    with tempfile.TemporaryDirectory() as place:
        names = write_adapters(Path(place), SLOTS * max(case.ratios))
        how = {"lora_dir": place, "max_adapter_loads_per_minute": 1_000_000, "max_queue": 8192}
        engine = Engine(MODEL, **sizes, **how, structured_outputs=False)
        with engine, rare_collections():  # as in a server
            return measure(engine, names, SLOTS, case)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.adapter_slots", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--turns", type=int, default=Case.turns)
    parser.add_argument("--requests", type=int, default=Case.requests)
    args = parser.parse_args()
    about = record.about()
    result = about | on_shipped_model(Case(turns=args.turns, requests=args.requests))
    record.write(args.out / "adapter_slots_cpu.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
