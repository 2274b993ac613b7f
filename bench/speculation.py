"""Rate of answers with speculation by n-grams, beside that without: edits, and free text.

`python -m bench.speculation --out DIR`: engines on a CPU, with and without, take turns; a ratio is
the median of the turns' ratios. For a machine that others use too, the processor's ratio is of
tokens per second of processor time in all turns. Two engines are without, "plain" and "twin": the
processor's ratio is over both, and the ratio of these two shows the noise. "edit": a Llama-shaped
model of 110 million parameters, whose answer repeats its prompt but for one token in 20 (its layers
are computed and add nothing). "free": the shipped model and its adapters, greedy and drawn, whose
answers repeat themselves now and then.
The answers of all engines are compared bit for bit.
"""

import argparse
import dataclasses
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from bench.random_model import LlamaShape, write_llama
from serving import Engine, Sampling

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 7,
    "prompt_lookup_max": 5,
    "prompt_lookup_min": 2,
}
SHIPPED = Path("assets/tiny-moe")
EDITS = 20  # one token in so many differs from the prompt
GREEDY = Sampling(max_tokens=160, temperature=0.0, ignore_eos=True)
EDIT = dataclasses.replace(GREEDY, max_tokens=80)
DRAWN = Sampling(max_tokens=160, temperature=1.0, seed=1, ignore_eos=True)
Rates = list[tuple[float, float]]  # of turns: by the clock, by processor time
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "structured_outputs": False}


@dataclasses.dataclass(frozen=True)
class Work:
    """Requests of one turn; they are handed in together."""

    name: str
    prompts: list[Any]
    adapters: list[str | None]
    sampling: Sampling


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
    prompts = [edit_prompt(1000 + 500 * row) for row in range(rows)]
    return Work(f"edit, {rows} at a time", prompts, [None] * rows, EDIT)


def free(rows: int, sampling: Sampling) -> Work:
    examples = json.loads((SHIPPED / "examples.json").read_text())["adapters"]
    names = sorted(name for name in os.listdir(SHIPPED / "adapters") if name in examples)
    chosen = [names[row % len(names)] for row in range(rows)]
    kind = "greedy" if sampling.greedy else "drawn"
    prompts = [examples[name] for name in chosen]
    return Work(f"free, {kind}, {rows} at a time", prompts, list(chosen), sampling)


def compare(
    model: Path, adapters: Mapping[str, Path], works: list[Work], turns: int, **fields: Any
) -> list[dict[str, Any]]:
    """Return rates of the engines for each work, and what the drafts were worth."""
    named = {name: str(path) for name, path in adapters.items()}
    fields |= SIZES
    with (
        Engine(str(model), named, **fields) as plain,
        Engine(str(model), named, speculative_config=NGRAM, **fields) as speculating,
        Engine(str(model), named, **fields) as twin,
    ):
        engines = {"plain": plain, "speculating": speculating, "twin": twin}
        return [_compare(engines, work, turns) for work in works]


def _compare(engines: dict[str, Engine], work: Work, turns: int) -> dict[str, Any]:
    rates: dict[str, Rates] = {name: [] for name in engines}
    answers = {name: _run(engine, work)[1] for name, engine in engines.items()}
    before = _accepted(engines["speculating"])
    names = list(engines)
    for turn in range(turns):
        first = turn % len(names)
        for name in [*names[first:], *names[:first]][:: -1 if turn // len(names) % 2 else 1]:
            rate, ids = _run(engines[name], work)
            rates[name].append(rate)
            if ids != answers["plain"]:
                raise AssertionError(f"{work.name}: other tokens than without speculation.")
    tokens = turns * sum(len(ids) for ids in answers["plain"])
    accepted = _accepted(engines["speculating"]) - before
    return {
        "work": work.name,
        "plain_tokens_per_s": round(statistics.median(rate for rate, _ in rates["plain"]), 1),
        "tokens_per_s": round(statistics.median(rate for rate, _ in rates["speculating"]), 1),
        "over_plain": _over(rates["speculating"], rates["plain"]),
        "processor_over_plain": _by_processor(rates["speculating"], rates["plain"] + rates["twin"]),
        "twin_over_plain": _over(rates["twin"], rates["plain"]),
        "twin_processor_over_plain": _by_processor(rates["twin"], rates["plain"]),
        "tokens_from_drafts": round(accepted / tokens, 2),
    }


def _over(ours: Rates, theirs: Rates) -> float:
    """Return the median of the turns' ratios, by the clock."""
    pairs = zip(ours, theirs, strict=True)
    return round(statistics.median(one[0] / other[0] for one, other in pairs), 3)


def _by_processor(ours: Rates, theirs: Rates) -> float:
    """Return the ratio of tokens per second of processor time, all turns together."""
    ours_s, theirs_s = (statistics.mean(1 / rate[1] for rate in one) for one in (ours, theirs))
    return round(theirs_s / ours_s, 3)


def _run(engine: Engine, work: Work) -> tuple[tuple[float, float], list[tuple[int, ...]]]:
    """Return tokens per second, and per second of processor time, of all requests; their tokens."""
    began, processor = time.monotonic(), time.process_time()
    outputs = engine.generate(work.prompts, work.adapters, work.sampling)
    seconds, processor = time.monotonic() - began, time.process_time() - processor
    ids = [output.outputs[0].token_ids for output in outputs]
    count = sum(map(len, ids))
    return (count / seconds, count / processor), ids


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of speculation_cpu.json")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--work", choices=MEASURED, help="work to run (default: all)")
    args = parser.parse_args()
    chosen = MEASURED if args.work is None else {args.work: MEASURED[args.work]}
    rows = [row for measure in chosen.values() for row in measure(args.turns)]
    result = {
        "command": "python -m bench.speculation",
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[0],
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "speculation_cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
