"""A workload that shifts between adapters and long contexts: one page pool against fixed shares.

`python -m bench.page_pool --out DIR`: a Llama of random weights. Three phases follow each other,
several times:

    adapters   short requests over many adapters, which fill the budget
    long       questions about documents, whose KV fills it
    both       both kinds, over half of the adapters and half of the documents

A phase has a fixed number of requests outstanding, as from a steady crowd of callers: where one is
answered the next one is handed in. A phase lasts from its first request until fewer than that are
left. So its transition counts, and no engine is measured while it runs empty.

On a CPU 5 million parameters, 60 MiB for KV pages and adapters. All engines are in one process and
have each phase in turn, the others idle, so that noise of the machine meets all. Times are
processor seconds of the process, for the machine may have other work. With `--large` on a GPU 16
layers of Llama-3.1-8B's shape and 3 GiB, documents that no two requests share, and wall-clock
seconds; there one engine follows the other, and phases follow each other without a pause.

Engines with fixed shares of the same bytes get them too. Of those the best is the one that takes
least time over all phases. The `ceiling` has all of these bytes for KV and as many again for
adapters: what a pool could give at best, whatever leaves first. `--engine NAME`, which may be
repeated, runs some engines and adds them to the results of others in DIR; with `--lock FILE`
engines of several processes, which all start at once, measure by turns.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import record, tier_throughput
from bench.random_model import LlamaShape, write_adapter, write_llama
from bench.turns import turn
from serving import Engine, Sampling
from serving.api.request import OutputDelta
from serving.engine.loop.pacing import SWITCH_S
from serving.runtime.garbage import rare_collections


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a budget, and what is asked for."""

    shape: LlamaShape
    budget: int  # bytes
    shares: tuple[float, ...]  # of adapters, in engines with fixed ones
    adapters: int
    rank: int
    documents: int  # 0: each request has its own
    tokens: int  # of a document
    answer: int  # tokens
    phases: dict[str, tuple[int, int]]  # requests of each kind
    outstanding: dict[str, int]  # requests at any time
    fields: dict[str, Any]


PHASES = ("adapters", "long", "both")
CEILING = "ceiling"
SMALL = Case(
    shape=LlamaShape(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        max_positions=1024,
    ),
    budget=60 << 20,
    shares=(0.12, 0.2, 0.35, 0.5),
    adapters=24,
    rank=32,
    documents=16,
    tokens=768,
    answer=24,
    phases={"adapters": (480, 0), "long": (0, 432), "both": (240, 216)},
    outstanding={"adapters": 16, "long": 16, "both": 16},
    fields={
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "max_loras": 24,
        "max_lora_rank": 32,
    },
)
LARGE = Case(
    shape=dataclasses.replace(tier_throughput.LLAMA_8B, num_layers=16, max_positions=4096),
    budget=3 << 30,
    shares=(0.25, 0.4, 0.55, 0.7),
    adapters=128,
    rank=16,
    documents=0,
    tokens=2048,
    answer=128,
    phases={"adapters": (480, 0), "long": (0, 120), "both": (180, 60)},
    outstanding={"adapters": 96, "long": 40, "both": 64},
    fields={
        "load_format": "dummy",
        "max_model_len": 2304,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "max_loras": 80,
        "max_lora_rank": 16,
        "max_total_adapter_bytes": 32 << 30,
    },
)


def requests(case: Case, phase: str, rng: random.Random) -> list[tuple[list[int], str | None]]:
    """Return prompts and adapters of a phase, in a random order."""
    short, long = case.phases[phase]
    parts, most = 2 if phase == "both" else 1, case.shape.vocab_size - 1
    asked: list[tuple[list[int], str | None]] = []
    for _ in range(short):
        prompt = [rng.randrange(3, most) for _ in range(8)]
        asked.append((prompt, f"a{rng.randrange(case.adapters // parts)}"))
    for _ in range(long):
        words = rng
        if case.documents:
            words = random.Random(rng.randrange(case.documents // parts))
        document = [words.randrange(3, most) for _ in range(case.tokens)]
        asked.append((document + [rng.randrange(3, most) for _ in range(8)], None))
    rng.shuffle(asked)
    return asked


class Crowd:
    """Callers of an engine: a fixed number of requests is outstanding at a time."""

    def __init__(self, engine: Engine, case: Case):
        self.engine, self._case = engine, case
        self._sampling = Sampling(max_tokens=case.answer, temperature=0.0, ignore_eos=True)
        self._ended = threading.Condition()
        self._waiting = 0
        self.answers: list[list[int]] = []  # of each request, in the order of hand_in
        self.gaps: list[float] = []  # seconds from a token to its next, of requests from now on
        self.failed = 0

    def hand_in(self, prompt: list[int], adapter: str | None) -> None:
        """Ask for an answer."""
        answer, gaps = [], self.gaps
        self.answers.append(answer)
        last: float | None = None

        def on_output(delta: OutputDelta) -> None:
            nonlocal last
            answer.extend(delta.token_ids)
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
            if delta.finish_reason is None:
                return
            with self._ended:
                self._waiting -= 1
                self.failed += len(answer) != self._case.answer
                self._ended.notify()

        with self._ended:
            self._waiting += 1
        self.engine.submit(prompt, adapter, self._sampling, on_output=on_output)

    def take(self, phase: str, asked: Sequence[tuple[list[int], str | None]]) -> dict[str, float]:
        """Ask for all answers of a phase, and return what the engine did meanwhile."""
        outstanding, self.gaps = self._case.outstanding[phase], []  # others' answers go on
        before = counts(self.engine)
        for prompt, adapter in asked:
            self.wait(outstanding)
            self.hand_in(prompt, adapter)
        self.wait(outstanding)
        after, gaps = counts(self.engine), list(self.gaps)
        figures = {name: after[name] - before[name] for name in after}
        for percent in (50, 99):
            figures[f"p{percent}_gap_ms"] = 1e3 * float(np.percentile(gaps, percent))
        return figures

    def wait(self, fewer_than: int) -> None:
        """Return when fewer callers than that wait."""
        with self._ended:
            self._ended.wait_for(lambda: self._waiting < fewer_than)


def counts(engine: Engine) -> dict[str, float]:
    """Return what an engine has done so far, and the time."""
    stats = engine.stats()
    return {
        "processor": time.process_time(),
        "wall": time.perf_counter(),
        "tokens": stats.generation_tokens,
        "steps": stats.steps,
        "loads": stats.adapter_swaps,
        "given": stats.pool.given,
        "asked": stats.prefix_queries,
        "found": stats.prefix_hits,
        "preemptions": stats.preemptions,
    }


def run(engines: dict[str, Engine], case: Case, rounds: int) -> dict[str, Any]:
    """Return what each engine did in each phase and round, and what it answered."""
    crowds = {name: Crowd(engine, case) for name, engine in engines.items()}
    found = {name: {phase: [] for phase in PHASES} for name in engines}
    for number in range(rounds + 1):  # the first round, a third of one, fills and is not counted
        for phase in PHASES:
            asked = requests(case, phase, random.Random(f"{number} {phase}"))
            for name, crowd in crowds.items():
                figures = crowd.take(phase, asked if number else asked[: len(asked) // 3])
                if len(engines) > 1:
                    crowd.wait(1)  # it is idle while others are measured
                if number:
                    found[name][phase].append(figures)
                    print(name, phase, {of: round(n, 2) for of, n in figures.items()}, flush=True)
    return {name: _summary(crowd, found[name]) for name, crowd in crowds.items()}


def _summary(crowd: Crowd, phases: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    crowd.wait(1)
    stats = crowd.engine.stats()
    return {
        "phases": phases,
        "failed": crowd.failed,
        "pool_bytes": stats.pool.total_bytes,
        "compilations_after_warmup": stats.compilations_after_warmup,
        "answers": hashlib.sha256(json.dumps(crowd.answers).encode()).hexdigest(),
    }


def write_files(folder: Path, case: Case) -> dict[str, str]:
    """Write the model and the adapters; return the adapters' folders by name."""
    names = [f"a{number}" for number in range(case.adapters)]
    if case.fields.get("load_format") == "dummy":
        tier_throughput.write_model(folder / "model", case.shape)
        targets = tuple(case.shape.linears())
        tier_throughput.write_adapters(folder, case.shape, case.adapters, targets, distinct=8)
    else:
        write_llama(folder / "model", case.shape)
        for number, name in enumerate(names):
            write_adapter(folder / name, case.shape, case.rank, seed=number)
    return {name: str(folder / name) for name in names}


def engines(case: Case) -> dict[str, dict[str, int]]:
    """Return the memory of each engine, by its name."""
    twice = {"lora_memory_bytes": case.budget, "kv_cache_memory_bytes": case.budget}
    found = {"pool": {"page_pool_bytes": case.budget}, CEILING: twice}
    for share in case.shares:
        lora = int(case.budget * share)
        left = case.budget - lora
        found[f"{share:.0%}"] = {"lora_memory_bytes": lora, "kv_cache_memory_bytes": left}
    return found


def measure(
    folder: Path, case: Case, rounds: int, names: Sequence[str], lock: Path | None
) -> dict[str, Any]:
    """Return what each engine gave, by its name."""
    adapters, found = write_files(folder, case), {}
    together = [[name] for name in names] if case is LARGE else [list(names)]
    for some in together:
        with contextlib.ExitStack() as stack:
            made = {
                name: stack.enter_context(make_engine(folder, adapters, case, name))
                for name in some
            }
            stack.enter_context(rare_collections())  # as in a server
            stack.enter_context(turn(lock))
            found |= run(made, case, rounds)
    print(json.dumps(found), flush=True)
    return found


def make_engine(folder: Path, adapters: dict[str, str], case: Case, name: str) -> Engine:
    """Return an engine with the memory that its name says."""
    how = {**case.fields, **engines(case)[name], "structured_outputs": False}
    return Engine(str(folder / "model"), adapters, max_queue=4096, **how)


def summary(found: dict[str, Any], case: Case, kind: str) -> dict[str, Any]:
    """Return tokens a second of each engine and phase, and the pool's against the best share."""
    took = {
        name: {phase: sum(one[kind] for one in rounds) for phase, rounds in of["phases"].items()}
        for name, of in found.items()
    }
    rates = {
        name: {
            phase: sum(one["tokens"] for one in rounds) / took[name][phase]
            for phase, rounds in of["phases"].items()
        }
        for name, of in found.items()
    }
    total = {name: sum(of.values()) for name, of in took.items()}
    shares = [name for name in found if name not in ("pool", CEILING)]
    if "pool" not in found or not shares:
        return {"tokens_per_s": rates}
    best = min(shares, key=lambda name: total[name])
    ratios = {phase: rates["pool"][phase] / rates[best][phase] for phase in PHASES}
    of_phase = {
        phase: rates["pool"][phase] / max(rates[name][phase] for name in shares) for phase in PHASES
    }
    return {
        "seconds_are": kind,
        "tokens_per_s": rates,
        "seconds_of_all_phases": total,
        "best_share": best,
        "pool_to_best_share": ratios,
        "p99_gap_to_best_share": _p99_gaps(found["pool"], found[best]),
        # Whose steps have as many rows: what is more than 1 is the pool's own doing.
        "p99_gap_to_ceiling": _p99_gaps(found["pool"], found[CEILING])
        if CEILING in rates
        else None,
        "in_worst_phase_of_the_split": max(ratios.values()),
        "all_phases": total[best] / total["pool"],
        "pool_to_best_share_of_each_phase": of_phase,
        "ceiling_to_best_share": {
            phase: rates[CEILING][phase] / rates[best][phase] for phase in PHASES
        }
        if CEILING in rates
        else None,
        "failed": {name: one["failed"] for name, one in found.items()},
        "same_answers": len({one["answers"] for one in found.values()}) == 1,
    }


def _p99_gaps(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Return the P99 gap between two tokens in each phase, over that of another engine."""
    return {phase: _p99_gap_ms(one, phase) / _p99_gap_ms(other, phase) for phase in PHASES}


def _p99_gap_ms(of_engine: dict[str, Any], phase: str) -> float:
    """Return the mean of a phase's rounds."""
    return float(np.mean([one["p99_gap_ms"] for one in of_engine["phases"][phase]]))


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.page_pool", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--large", action="store_true", help="sizes for a GPU")
    parser.add_argument(
        "--engine",
        action="append",
        help="engine to measure: pool, ceiling, or a fixed share such as 20%% (default: all)",
    )
    parser.add_argument(
        "--lock", type=Path, help="lock file that is held while an engine is measured"
    )
    args = parser.parse_args()
    case, about = LARGE if args.large else SMALL, record.about()
    names = args.engine or list(engines(case))
    sys.setswitchinterval(SWITCH_S)  # as in a server
    with tempfile.TemporaryDirectory() as place:
        found = measure(Path(place), case, args.rounds, names, args.lock)
    args.out.mkdir(parents=True, exist_ok=True)  # before its lock file
    about["device"] = record.jax_device()
    file = args.out / f"page_pool_{record.in_file_name(about['device'])}.json"
    with turn(args.lock):
        told = json.loads(file.read_text()) if args.engine and file.exists() else {"engines": {}}
        all_found = {**told["engines"], **found}
        result = {
            **about,
            "case": dataclasses.asdict(case),
            "summary": summary(all_found, case, "wall" if args.large else "processor"),
            "engines": all_found,
        }
        record.write(file, result)
    print(json.dumps(result["summary"], indent=1))


if __name__ == "__main__":
    main()
