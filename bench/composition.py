"""Two adapters composed by requests, beside one adapter of the summed rank.

`python -m bench.composition --out DIR`: a Llama of random weights with 110 million parameters on a
CPU, 16 requests at a time. The composed adapters have rank 8 each, the other one rank 16; both ways
take turns. Processor seconds of the process, for the machine may have other work. The time of the
first request of a sum, which copies matrices, is told apart.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import record
from bench.random_model import LlamaShape, write_adapter, write_llama
from serving import Engine, Sampling

SHAPE = LlamaShape(vocab_size=4096)
RANKS = {"first": 8, "second": 8, "whole": 16}
WAYS: dict[str, Any] = {"composed": {"first": 0.7, "second": 0.5}, "one adapter": "whole"}
ROWS, PROMPT, ANSWER = 16, 16, 32


def seconds(engine: Engine, adapter: str | Mapping[str, float] | None, rows: int = ROWS) -> float:
    """Return the processor seconds of so many requests at once."""
    rng = random.Random(rows)
    prompts = [[rng.randrange(3, SHAPE.vocab_size - 1) for _ in range(PROMPT)] for _ in range(rows)]
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    begun = time.process_time()
    engine.generate(prompts, [adapter] * rows, [sampling] * rows)
    return time.process_time() - begun


def measure(folder: Path, turns: int) -> dict[str, Any]:
    """Return medians of each way, and their ratio turn by turn."""
    write_llama(folder / "model", SHAPE)
    adapters = {}
    for seed, (name, rank) in enumerate(RANKS.items()):
        write_adapter(folder / name, SHAPE, rank, seed=seed)
        adapters[name] = str(folder / name)
    sizes = {"max_model_len": 64, "max_num_seqs": ROWS, "max_num_batched_tokens": 64}
    sizes |= {"max_loras": 4, "max_lora_rank": 16}
    how = {"enable_prefix_caching": False, "structured_outputs": False, **sizes}
    with Engine(str(folder / "model"), adapters, **how) as engine:
        seconds(engine, "whole", 1)
        alone = seconds(engine, "whole", 1)
        first = seconds(engine, WAYS["composed"], 1)
        took: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(turns + 1):  # the first turn is not counted
            for way, adapter in WAYS.items():
                took[way].append(seconds(engine, adapter))
    counted = {way: each[1:] for way, each in took.items()}
    ratios = [a / b for a, b in zip(counted["composed"], counted["one adapter"], strict=True)]
    return {
        "processor_s": {way: statistics.median(each) for way, each in counted.items()},
        "composed_over_one": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "first_request_of_a_sum_s": first - alone,
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(prog="python -m bench.composition", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    about = record.about()
    with tempfile.TemporaryDirectory() as place:
        result = about | measure(Path(place), args.turns)
    record.write(args.out / "composition_cpu.json", result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
