"""A whole engine over several devices: it answers 64 requests at once, base and adapters.

`python -m bench.parallel served --model llama-3.1-70b --devices 2 --out DIR`. The time of a token
is the slope between answers of few and of many tokens, so it has all that the host does. No answer
ends before all prompts are computed, so the slope has no prompts in it. `--profile` adds the
kernels of a decode step on one device.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.parallel.quiet import Quiet
from bench.parallel.shapes import write_config, write_lora
from bench.step_profile import Kernels, longest, profile_step
from serving import Engine, Sampling

ROWS, PROMPT, BUDGET, ADAPTERS, RANK = 64, 128, 128, 4, 16


def fewest_tokens(rows: int, prompt: int, budget: int) -> int:
    """Return how long answers are at least, so that none ends before all prompts are computed.

    A step of `budget` tokens gives a token to each row that has its prompt, at most all of them,
    and computes prompts with the rest.
    """
    return -(-rows * prompt // (budget - rows))


FEW = fewest_tokens(ROWS, PROMPT, BUDGET)
MANY = FEW + 64


def measure(
    raw: dict[str, Any],
    devices: int,
    folder: Path,
    quiet: Quiet,
    *,
    profiled: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """Return what the engine did, and its times; with `profiled` the kernels of a step too."""
    model, adapters = write_config(folder / "model", raw), write_adapters(folder)
    fields = engine_fields(raw, devices) | fields
    begun = time.perf_counter()
    with Engine(str(model), adapters, **fields) as engine:
        start_s = time.perf_counter() - begun
        cases = {"base": [None], f"base and {ADAPTERS} adapters": [None, *adapters]}
        with quiet.alone():
            rows = {n: token_ms(engine, raw["vocab_size"], names) for n, names in cases.items()}
            kernels = {
                n: _kernels(engine, names, devices) for n, names in cases.items() if profiled
            }
        stats = engine.stats()
    return {
        "devices": devices,
        "layers": raw["num_hidden_layers"],
        "requests": ROWS,
        "prompt_tokens": PROMPT,
        "start_s": round(start_s, 1),
        "ms_a_token": rows,
        "kernels": kernels,
        "compilations_after_warmup": stats.compilations_after_warmup,
    }


def write_adapters(folder: Path) -> dict[str, str]:
    """Write the adapters and return their folders."""
    return {f"a{n}": write_lora(folder / f"a{n}", RANK, RANK + n) for n in range(ADAPTERS)}


def engine_fields(raw: dict[str, Any], devices: int) -> dict[str, Any]:
    """Return the options of an engine of the model over so many devices, with room for the rows."""
    length = PROMPT + MANY + 16
    per_token = 2 * raw["num_hidden_layers"] * raw["num_key_value_heads"] * raw["head_dim"] * 2
    room = (ROWS + 1) * -(-length // 16) * 16 * per_token // devices
    return {
        "load_format": "dummy",
        "dtype": "bfloat16",
        "tensor_parallel_size": devices,
        "kv_cache_memory_bytes": room,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": BUDGET,
        "max_model_len": length,
        "max_loras": ADAPTERS,
        "max_lora_rank": RANK,
        "max_esft_adapters": 0,
        "structured_outputs": False,
        "compile_base_only_steps": False,  # fewer programs to compile
    }


def token_ms(engine: Engine, vocab: int, names: list[str | None]) -> float:
    """Return the milliseconds of a step in which every request gets a token."""
    rng, took = np.random.default_rng(1), {}
    asked = [names[row % len(names)] for row in range(ROWS)]
    for tokens in (FEW, FEW, MANY):  # the first time loads adapters
        prompts = rng.integers(4, vocab, (ROWS, PROMPT)).tolist()
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        begun = time.perf_counter()
        outputs = engine.generate(prompts, asked, sampling)
        took[tokens] = time.perf_counter() - begun
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
    return round((took[MANY] - took[FEW]) / (MANY - FEW) * 1e3, 3)


def _kernels(engine: Engine, names: list[str | None], devices: int) -> Kernels:
    """Return (launches, us) of the kernels that take longest in a step of a token for every row."""
    asked = [names[row % len(names)] for row in range(ROWS)]
    sampling = Sampling(max_tokens=MANY - FEW, temperature=0.0, ignore_eos=True)
    prompts = [[4 + row] for row in range(ROWS)]
    kernels = profile_step(lambda: engine.generate(prompts, asked, sampling))
    return longest(kernels, (MANY - FEW) * devices)
