"""Rate of answers with speculation by n-grams, beside that without: edits, and free text.

`python -m bench.speculation --out DIR`: one engine on a CPU takes turns of four runs of the same
requests: without drafts, with, with, without; every second turn the other way round. Nothing else
differs: weights, pages and programs are the same. A ratio is the median of the turns' ratios of
seconds, by the clock and by the processor time of the process, for a machine that others use too;
its interval holds the true median with a probability of 95 % at least (of 6 turns or more). The
noise is that of each turn's two runs without drafts. "edit": a Llama-shaped model of 110
million parameters, whose answer repeats its prompt but for one token in 20 (its layers are computed
and add nothing). "free": the shipped model and its adapters, greedy and drawn, whose answers repeat
themselves now and then. The answers of all runs are compared bit for bit.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from bench import record
from bench.random_model import LlamaShape, write_llama
from serving import Engine, Sampling

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 7,
    "prompt_lookup_max": 5,
    "prompt_lookup_min": 2,
}
SHIPPED = Path("assets/tiny-moe")
LEAST_FREE = 4  # requests of a run, also where one runs at a time
EDITS = 20  # one token in so many differs from the prompt
GREEDY = Sampling(max_tokens=160, temperature=0.0, ignore_eos=True)
EDIT = dataclasses.replace(GREEDY, max_tokens=80)
DRAWN = Sampling(max_tokens=160, temperature=1.0, seed=1, ignore_eos=True)
Seconds = tuple[float, float]  # of a run: by the clock, by processor time
Turns = list[dict[bool, list[Seconds]]]  # runs with and without drafts
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "structured_outputs": False}


@dataclasses.dataclass(frozen=True)
class Work:
    """Requests of one run; so many at a time are handed in together."""

    name: str
    prompts: list[Any]
    adapters: list[str | None]
    sampling: Sampling
    at_once: int

    def batches(self) -> Iterator[tuple[list[Any], list[str | None]]]:
        """Yield prompts and adapters of the requests that run together."""
        for first in range(0, len(self.prompts), self.at_once):
            end = first + self.at_once
            yield self.prompts[first:end], self.adapters[first:end]


def write_copying_model(folder: Path, shape: LlamaShape) -> None:
    """Write a model in which token t is followed by t + 1, whatever its layers compute."""
    write_llama(folder, shape)
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = np.zeros_like(tensors[name])
    tensors["lm_head.weight"] = np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_prompt(start: int) -> list[int]:
    """Return a text in which one token in EDITS is not what will follow, then where it begins."""
    text = list(range(start, start + 200))
    text[EDITS // 2 :: EDITS] = [7] * len(text[EDITS // 2 :: EDITS])
    return [*text, 5, start, start + 1]


def edits(rows: int) -> Work:
    """Return prompts that ask for a text with small changes, `rows` at a time."""
    prompts = [edit_prompt(1000 + 500 * row) for row in range(rows)]
    return Work(f"edit, {rows} at a time", prompts, [None] * rows, EDIT, rows)


def free(rows: int, sampling: Sampling) -> Work:
    """Return the adapters' own example prompts, `rows` at a time."""
    examples = json.loads((SHIPPED / "examples.json").read_text())["adapters"]
    names = sorted(name for name in os.listdir(SHIPPED / "adapters") if name in examples)
    chosen = [names[place % len(names)] for place in range(max(rows, LEAST_FREE))]
    kind = "greedy" if sampling.greedy else "drawn"
    prompts = [examples[name] for name in chosen]
    return Work(f"free, {kind}, {rows} at a time", prompts, list(chosen), sampling, rows)


class Drafts:
    """Turns the drafts of an engine that has nothing to do on and off."""

    def __init__(self, engine: Engine):
        self._scheduler = engine._parts.loop._parts.scheduler  # no option of a running engine
        self._speculation = self._scheduler._speculation

    def turn(self, *, on: bool) -> None:
        if self._speculation is not None:  # which is not to take the runs between for a step
            self._speculation.pause()
        self._scheduler._speculation = self._speculation if on else None


def compare(
    model: Path, adapters: Mapping[str, Path], works: list[Work], turns: int, **fields: Any
) -> list[dict[str, Any]]:
    """Return rates with and without drafts for each work, and what the drafts were worth."""
    named = {name: str(path) for name, path in adapters.items()}
    with Engine(str(model), named, speculative_config=NGRAM, **SIZES, **fields) as engine:
        return [_compare(engine, work, turns) for work in works]


def _compare(engine: Engine, work: Work, turns: int) -> dict[str, Any]:
    drafts, taken = Drafts(engine), []
    answers = [_run(engine, work, drafts, on=on)[1] for on in (False, True)]
    before = _accepted(engine)
    for turn in range(turns):
        runs: dict[bool, list[Seconds]] = {True: [], False: []}
        for on in (False, True, True, False) if turn % 2 else (True, False, False, True):
            seconds, ids = _run(engine, work, drafts, on=on)
            runs[on].append(seconds)
            answers.append(ids)
        taken.append(runs)
    if any(ids != answers[0] for ids in answers):
        raise AssertionError(f"{work.name}: other tokens than without drafts.")
    tokens = sum(len(ids) for ids in answers[0])
    return {
        "work": work.name,
        "plain_tokens_per_s": round(tokens / _median(taken, False), 1),
        "tokens_per_s": round(tokens / _median(taken, True), 1),
        "over_plain": round(statistics.median(_ratios(taken, 0)), 3),
        "interval": _interval(_ratios(taken, 0)),
        "processor_over_plain": round(statistics.median(_ratios(taken, 1)), 3),
        "processor_interval": _interval(_ratios(taken, 1)),
        "noise": _noise(taken, 0),
        "processor_noise": _noise(taken, 1),
        "tokens_from_drafts": round((_accepted(engine) - before) / (2 * turns * tokens), 2),
    }


def _median(taken: Turns, on: bool) -> float:
    return statistics.median(seconds for turn in taken for seconds, _ in turn[on])


def _ratios(taken: Turns, place: int) -> list[float]:
    """Return the turns' ratios, seconds without drafts over those with."""
    sums = [{on: sum(run[place] for run in turn[on]) for on in turn} for turn in taken]
    return [turn[False] / turn[True] for turn in sums]


def _interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest pair of ratios that holds the median with 95 %, or the outermost one.

    The true median is below the lowest k + 1 of n ratios with the chance of at most k heads in n
    throws of a coin.
    """
    count, ordered, outside, cut = len(ratios), sorted(ratios), 0.0, 0
    for k in range(count // 2):
        outside += math.comb(count, k) / 2**count
        if 2 * outside > 0.05:
            break
        cut = k
    return round(ordered[cut], 3), round(ordered[-1 - cut], 3)


def _noise(taken: Turns, place: int) -> float:
    """Return how far the ratio of a turn's runs without drafts is from 1, as a median."""
    pairs = [[run[place] for run in turn[False]] for turn in taken]
    return round(statistics.median(max(pair) / min(pair) - 1 for pair in pairs), 3)


def _run(
    engine: Engine, work: Work, drafts: Drafts, *, on: bool
) -> tuple[Seconds, list[tuple[int, ...]]]:
    """Return seconds by the clock and of the processor that all requests took; their tokens."""
    drafts.turn(on=on)
    began, processor = time.monotonic(), time.process_time()
    outputs = [o for some in work.batches() for o in engine.generate(*some, work.sampling)]
    seconds = time.monotonic() - began, time.process_time() - processor
    return seconds, [output.outputs[0].token_ids for output in outputs]


def _accepted(engine: Engine) -> float:
    labels = {"model_name": engine.model_info.name, "engine": "0"}
    name = "vllm:spec_decode_num_accepted_tokens_total"
    return engine.metrics.registry.get_sample_value(name, labels) or 0.0


def measure_edits(turns: int) -> list[dict[str, Any]]:
    """Return a row for each work of the copying model."""
    with tempfile.TemporaryDirectory() as place:
        model = Path(place) / "copying"
        write_copying_model(model, LlamaShape())
        works = [edits(rows) for rows in (1, 4, 8)]
        return compare(model, {}, works, turns, dtype="bfloat16")


def measure_free(turns: int) -> list[dict[str, Any]]:
    """Return a row for each work of the shipped model."""
    adapters = {path.name: path for path in (SHIPPED / "adapters").iterdir()}
    works = [free(count, sampling) for sampling in (GREEDY, DRAWN) for count in (1, 4, 8)]
    return compare(SHIPPED, adapters, works, turns)


MEASURED = {"edit": measure_edits, "free": measure_free}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of speculation_cpu.json")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--work", choices=MEASURED, help="work to run (default: all)")
    args = parser.parse_args()
    chosen = MEASURED if args.work is None else {args.work: MEASURED[args.work]}
    about = record.about()
    rows = [row for measure in chosen.values() for row in measure(args.turns)]
    record.write(args.out / "speculation_cpu.json", about | {"rows": rows})
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
