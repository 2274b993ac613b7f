"""Side by side in one run: this engine against transformers + PEFT mixed batches, on a CPU.

    python -m bench.serve --cpu --out bench/results

Both sides read the same random Llama checkpoint and the same adapters from disk, in the same
dtype, with the same number of threads. Each repeat times PEFT mixed, ours mixed and ours base in
turn, so that a slow moment of the machine hits all of them; ratios are medians over repeats.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import peft_baseline, record, report
from bench.random_model import LlamaShape, write_adapter, write_llama
from serving import Engine, Sampling

CASE = {"requests": 8, "adapters": 8, "rank": 16, "prompt_tokens": 128, "output_tokens": 64}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve")
    parser.add_argument(
        "--cpu",
        action="store_true",
        required=True,
        help="compare with transformers + PEFT on a CPU",
    )
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output-tokens", type=int, default=CASE["output_tokens"])
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    return parser.parse_args()


def ours(
    engine: Engine, prompts: list[list[int]], names: list[str | None], num_out: int
) -> tuple[list[list[int]], float]:
    """Greedy tokens of one mixed batch and the seconds it took."""
    sampling = Sampling(max_tokens=num_out, temperature=0.0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = engine.generate(prompts, adapter=names, sampling=sampling)
    seconds = time.perf_counter() - start
    return [list(out.outputs[0].token_ids) for out in outputs], seconds


def same_tokens(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of requests whose whole greedy text is the same token for token."""
    return sum(x == y for x, y in zip(a, b, strict=True)) / len(a)


def measure(root: Path, dtype: str, repeats: int, num_out: int) -> dict[str, Any]:
    """Run one dtype; rates are output tokens per second over the whole batch, prefill included."""
    adapters = {f"adapter-{i}": root / f"adapter-{i}" for i in range(CASE["adapters"])}
    names: list[str | None] = list(adapters)
    base: list[str | None] = [None] * CASE["requests"]
    rng = np.random.default_rng(7)
    paths = {name: str(path) for name, path in adapters.items()}
    seconds: dict[str, list[float]] = {"peft_mixed": [], "ours_mixed": [], "ours_base": []}
    agreement = []
    with (
        peft_baseline.PeftProcess(root / "model", adapters, dtype) as peft,
        Engine(
            str(root / "model"),
            adapters=paths,
            dtype=dtype,
            max_loras=CASE["adapters"],
            max_lora_rank=CASE["rank"],
            enable_prefix_caching=False,
        ) as engine,
    ):
        for repeat in range(repeats + 1):
            shape = (CASE["requests"], CASE["prompt_tokens"])
            prompts = rng.integers(3, LlamaShape().vocab_size, shape).tolist()
            want, peft_s = peft.generate(prompts, names, num_out)
            got, mixed_s = ours(engine, prompts, names, num_out)
            _, base_s = ours(engine, prompts, base, num_out)
            if repeat == 0:
                continue  # warm-up of both sides
            agreement.append(same_tokens(want, got))
            for key, value in zip(seconds, (peft_s, mixed_s, base_s), strict=True):
                seconds[key].append(value)
    return {"dtype": dtype} | summary(num_out, seconds, agreement)


def summary(num_out: int, seconds: dict[str, list[float]], agreement: list[float]) -> dict:
    """Rates and ratios from the times of all repeats."""
    tokens = CASE["requests"] * num_out
    median = {key: statistics.median(values) for key, values in seconds.items()}
    return {
        "output_tokens_per_s": {key: tokens / value for key, value in median.items()},
        "ours_over_peft": median["peft_mixed"] / median["ours_mixed"],
        "mixed_over_base": median["ours_base"] / median["ours_mixed"],
        "requests_with_equal_text": statistics.mean(agreement),
        "seconds": seconds,
    }


def main() -> None:
    """Run every dtype and write the JSON and the plot."""
    args, about = parse_args(), record.about()
    with tempfile.TemporaryDirectory() as tmp:
        root, shape = Path(tmp), LlamaShape()
        parameters = write_llama(root / "model", shape)
        for i in range(CASE["adapters"]):
            write_adapter(root / f"adapter-{i}", shape, CASE["rank"], seed=i + 1)
        sizes = args.repeats, args.output_tokens
        rows = [measure(root, dtype, *sizes) for dtype in args.dtype]
    result = {
        **about,
        "case": CASE | {"parameters": parameters, "output_tokens": args.output_tokens},
        "rows": rows,
    }
    record.write(args.out / "serve_cpu.json", result)
    report.plot_serve_cpu(result, args.out / "serve_cpu.png")
    for row in rows:
        rates = ", ".join(f"{k} {v:.0f} tok/s" for k, v in row["output_tokens_per_s"].items())
        print(
            f"{row['dtype']}: {rates}; {row['ours_over_peft']:.2f}x PEFT; "
            f"with 8 adapters {row['mixed_over_base']:.0%} of base; "
            f"equal text {row['requests_with_equal_text']:.0%}"
        )


if __name__ == "__main__":
    main()
