"""Throughput of many adapters by Zipf beside that of one, in a whole engine of a large model.

`python -m bench.tier_throughput --out DIR` on a GPU: random weights in the shape of Llama-3.1-8B,
made on the device, and adapters of rank 16 on q_proj and v_proj in bfloat16, 13.6 MB each. A few
adapters' files have bytes of their own; the others are hard links to them beside a config of their
own, so that each has its own digest and reads and copies as many bytes. A tenth of the requests
ask the base model. A fixed number of callers ask, each again as soon as it is answered, so that no
figure has a beginning or an end in which rows are idle. First-token times of 1, 2, 4 and 8 adapters
for each slot come last, as `bench.adapter_slots` measures them, in an engine with a slot for each
row: with fewer slots 70% of the rows' load may name more adapters at a time than there are slots,
which no order of loads can serve. `--small` runs the same on a CPU in a minute, to try it.
"""

import argparse
import dataclasses
import functools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from bench import adapter_slots, record
from bench.crowd import Crowd, tier_hits
from bench.random_model import LlamaShape, llama_config
from bench.turns import turn
from serving import Engine

LLAMA_8B = LlamaShape(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    max_positions=2048,
)
SMALL = LlamaShape(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    max_positions=256,
)
TARGETS = ("self_attn.q_proj", "self_attn.v_proj")
RANK, DISTINCT = 16, 32
PARTS = ("throughput", "slots")


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of a run; a population is so many adapters, asked for by Zipf."""

    populations: tuple[int, ...] = (1000, 10000)
    on_device: int = 30
    on_host: int = 1000
    rows: int = 64
    prompt: int = 128
    answer: int = 128
    callers: int = 256
    requests: int = 768  # answered in a round
    rounds: int = 2
    zipf: float = 1.0
    base_share: float = 0.1
    uniform: int = 320  # requests of each ratio of adapters to slots


SMALL_CASE = Case((40, 100), 8, 64, 8, 16, 16, callers=24, requests=64, uniform=64)


def write_model(folder: Path, shape: LlamaShape) -> None:
    """Write the config alone: weights are made up on the device."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config(shape) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


def write_adapters(
    folder: Path,
    shape: LlamaShape,
    count: int,
    targets: tuple[str, ...] = TARGETS,
    *,
    distinct: int = DISTINCT,
) -> list[str]:
    """Write adapters, all but the first ones by hard links; return their names."""
    rng, files = np.random.default_rng(0), []
    for number in range(min(distinct, count)):
        tensors = {}
        for layer in range(shape.num_layers):
            for name in targets:
                d_out, d_in = shape.linears()[name]
                path = f"base_model.model.model.layers.{layer}.{name}"
                for part, dims in (("lora_A", (RANK, d_in)), ("lora_B", (d_out, RANK))):
                    values = rng.standard_normal(dims, dtype=np.float32) * 0.01
                    tensors[f"{path}.{part}.weight"] = values.astype(ml_dtypes.bfloat16)
        files.append(folder / f"{number}.safetensors")
        save_file(tensors, files[-1], metadata={"format": "pt"})
    names = [f"a{number}" for number in range(count)]
    for number, name in enumerate(names):
        (folder / name).mkdir()
        os.link(files[number % len(files)], folder / name / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "revision": name,  # its own digest
            "r": RANK,
            "lora_alpha": RANK,
            "target_modules": [target.split(".")[-1] for target in targets],
        }
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
    return names


def fields_of(case: Case, shape: LlamaShape, folder: Path, slots: int) -> dict[str, Any]:
    """Return the settings of an engine with so many adapter slots."""
    length = case.prompt + case.answer + 16
    token = 4 * shape.num_layers * shape.num_kv_heads * shape.head_dim  # bytes of KV in bfloat16
    return {
        "load_format": "dummy",
        "max_model_len": length,
        "max_num_seqs": case.rows,
        "max_num_batched_tokens": max(512, case.rows),
        "kv_cache_memory_bytes": (case.rows + 1) * (length + 16) * token,
        "max_queue": 8192,
        "structured_outputs": False,
        "enable_prefix_caching": False,
        "max_lora_rank": RANK,
        "max_loras": slots,
        "max_cpu_loras": case.on_host,
        "max_total_adapter_bytes": 64 << 30,
        "lora_dir": str(folder / "adapters"),
        "max_adapter_loads_per_minute": 1_000_000,
        "adapter_wait_s": 600.0,
    }


def measure_throughput(
    engine: Engine,
    names: list[str],
    case: Case,
    lock: Path | None,
    keep: Callable[[dict], None],
) -> dict[str, Any]:
    """Return the figures of one adapter and of each population; `keep` gets those so far."""
    rng, result = random.Random(1), {}
    cases = {"one": names[:1]} | {str(n): names[:n] for n in case.populations}
    for key, population in cases.items():
        with turn(lock):
            results = measure_population(engine, population, case, rng)
        if key != "one":
            one = result["one"]
            results["ratio"] = results["tokens_per_s"] / one["tokens_per_s"]
            results["base_tpot_ratio"] = results["base_tpot_ms"] / one["base_tpot_ms"]
        result[key] = results
        keep(result)
        time.sleep(1.0)  # for another process to have its turn
    return result


def measure_population(
    engine: Engine, population: list[str], case: Case, rng: random.Random
) -> dict[str, Any]:
    """Return the figures of some adapters, which are medians of the rounds."""
    crowd, rounds = Crowd(engine, population, case, rng), []
    crowd.fill()
    crowd.begin()
    for _ in range(case.rounds):
        before, steps = tier_hits(engine), engine.stats().steps
        figures = crowd.round()
        after = tier_hits(engine)
        figures["hits"] = {tier: after[tier] - before[tier] for tier in after}
        figures["steps"] = engine.stats().steps - steps
        rounds.append(figures)
        print(len(population), figures, flush=True)
    crowd.end()
    results: dict[str, Any] = {
        name: statistics.median(one[name] for one in rounds)
        for name in ("tokens_per_s", "base_tpot_ms")
    }
    return results | {"rounds": rounds}


def measure_slots(engine: Engine, names: list[str], case: Case) -> dict[str, Any]:
    """Return first-token times of more adapters than slots, of which there are as many as rows."""
    uniform = adapter_slots.Case(
        requests=case.uniform, turns=1, prompt=case.prompt, answer=case.answer // 2
    )
    names = names[: case.rows * max(uniform.ratios)]
    return adapter_slots.measure(engine, names, case.rows, uniform)


def measure(
    case: Case,
    shape: LlamaShape,
    parts: Sequence[str],
    lock: Path | None,
    keep: Callable[[dict], None],
) -> None:
    """Measure what is asked for; `keep` gets what is known so far."""
    result: dict[str, Any] = {"case": dataclasses.asdict(case)}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_model(folder / "model", shape)
        (folder / "adapters").mkdir()
        names = write_adapters(folder / "adapters", shape, max(case.populations))
        for part in parts:
            slots = case.on_device if part == "throughput" else case.rows
            how = fields_of(case, shape, folder, slots)
            with Engine(str(folder / "model"), **how) as engine:
                if part == "throughput":
                    keep_so_far = functools.partial(_keep_more, keep, dict(result))
                    result |= measure_throughput(engine, names, case, lock, keep_so_far)
                else:
                    with turn(lock):
                        result["adapters_to_slots"] = measure_slots(engine, names, case)
                    print(result["adapters_to_slots"], flush=True)
                told = "compilations_after_warmup"
                result[told] = result.get(told, 0) + engine.stats().compilations_after_warmup
            keep(result)


def _keep_more(keep: Callable[[dict], None], known: dict, more: dict) -> None:
    keep(known | more)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.tier_throughput", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--part", choices=PARTS, help="part to run (default: all)")
    parser.add_argument(
        "--lock", type=Path, help="lock file that is held while an engine is measured"
    )
    args = parser.parse_args()
    case, shape = Case(), LLAMA_8B
    if args.small:
        case, shape = SMALL_CASE, SMALL
    else:
        record.need_gpu("--small runs on a CPU.")
    parts = PARTS if args.part is None else (args.part,)
    told = record.about(record.jax_device())
    device = record.in_file_name(told["device"])
    of_part = f"_{args.part}" if args.part else ""
    file = args.out / f"tier_throughput{of_part}_{device}.json"
    measure(case, shape, parts, args.lock, lambda result: record.write(file, told | result))


if __name__ == "__main__":
    main()
