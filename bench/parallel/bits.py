"""Answers of an engine over several devices beside those of one: every token and log-probability.

`python -m bench.parallel bits --out DIR`. A batch has base rows, rows of LoRA adapters that take
turns in fewer slots, and rows of ESFT adapters that take turns in one; prompts come in chunks, and
pages are few enough that sequences are preempted. With `--long` a step takes 2,048 tokens, of whose
rows each device of a split computes a share. Weights are random (`load_format` dummy).
"""

import dataclasses
import hashlib
import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.parallel.quiet import Quiet
from bench.parallel.shapes import write_config, write_esft, write_lora
from serving import Engine, RequestOutput, Sampling

REQUESTS, ANSWER = 20, 24
SEQUENCES, PAGE = 16, 16
RANKS = (8, 16, 32)
PAUSE_S = 0.5  # between engines, for parts that wait to measure alone
SCORED = Sampling(
    max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1
)
DRAWN = Sampling(max_tokens=ANSWER, temperature=1.0, seed=3, top_k=40, logprobs=0, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the batches: the pages are fewer than sequences of the longest prompts want."""

    step: int = 256  # tokens
    longest: int = 300  # prompt
    pages: int = 64

    @property
    def model_len(self) -> int:
        """Tokens of the longest sequence, its answer included."""
        return min(2 * max(self.longest, 256), self.pages * PAGE)


LONG = Sizes(step=2048, longest=1200, pages=96)


@dataclasses.dataclass(frozen=True)
class Run:
    """Answers of an engine, and its own statistics."""

    answers: list[tuple[Any, ...]]
    facts: dict[str, Any]


def measure(
    name: str,
    devices: list[int],
    folder: Path,
    raw: dict[str, Any],
    quiet: Quiet,
    *,
    long: bool = False,
) -> dict[str, Any]:
    """Return the result of one model over each number of devices.

    Where experts are, both ways to split them are compared.
    """
    sizes = LONG if long else Sizes()
    kind = "moe" if "num_experts" in raw else "dense"
    model = write_config(folder / kind, raw | {"max_position_embeddings": sizes.model_len})
    adapters = _write_adapters(folder, raw, kind)
    with quiet.busy():
        one = run(model, adapters, raw, 1, sizes)
    rows = []
    for size in devices:
        for experts in ("ep", "tp") if kind == "moe" else (None,):
            fields = {} if experts is None else {"enable_expert_parallel": experts == "ep"}
            try:
                with quiet.busy():
                    several = run(model, adapters, raw, size, sizes, **fields)
                row = compare(one, several) | several.facts
            except Exception as error:  # the other rows are worth as much
                row = {"equal": False, "error": f"{type(error).__name__}: {error}"[:2000]}
            rows.append({"devices": size, "experts": experts} | row)
            print(name, rows[-1], flush=True)
            time.sleep(PAUSE_S)
    about = {"model": raw, "requests": REQUESTS, "sizes": dataclasses.asdict(sizes)}
    return about | {"one": one.facts, "rows": rows}


def _write_adapters(folder: Path, raw: dict[str, Any], kind: str) -> dict[str, str]:
    """Write three LoRA adapters, and for experts two ESFT adapters, the second with few of them."""
    adapters = {f"r{rank}": write_lora(folder / f"{kind}-r{rank}", rank) for rank in RANKS}
    if kind == "moe":
        count, layers = raw["num_experts"], raw["num_hidden_layers"]
        many = {layer: [layer % count, (layer + 3) % count, count - 1] for layer in range(layers)}
        chosen = ({n: sorted(set(e)) for n, e in many.items()}, {0: [1], layers - 1: [0, 2]})
        for number, experts in enumerate(chosen):
            adapters[f"e{number}"] = write_esft(folder / f"e{number}", raw, experts, number)
    return adapters


def run(
    model: Path,
    adapters: dict[str, str],
    raw: dict[str, Any],
    devices: int,
    sizes: Sizes,
    **fields: Any,
) -> Run:
    """Return the answers of an engine over so many devices."""
    per_token = 2 * raw["num_hidden_layers"] * raw["num_key_value_heads"] * raw["head_dim"] * 2
    fields |= {"load_format": "dummy", "tensor_parallel_size": devices, "dtype": "bfloat16"}
    fields |= {"max_num_seqs": SEQUENCES, "max_num_batched_tokens": sizes.step}
    fields |= {"max_model_len": sizes.model_len}
    fields |= {"max_loras": 2, "max_lora_rank": max(RANKS), "structured_outputs": False}
    fields |= {
        "kv_cache_memory_bytes": sizes.pages * PAGE * per_token // devices,
        "block_size": PAGE,
    }
    fields |= {"max_esft_adapters": 0}
    if any(name.startswith("e") for name in adapters):
        fields |= {"max_esft_adapters": 1, "max_esft_experts": 3, "esft_memory_bytes": 512 << 20}
    names = [None, *adapters]
    begun = time.perf_counter()
    with Engine(str(model), adapters, **fields) as engine:
        ready = time.perf_counter()
        outputs = outputs_of(engine, raw["vocab_size"], names, sizes.longest)
        outputs += outputs_of(engine, raw["vocab_size"], names[:6], sizes.longest)[:6]  # again
        outputs += _crowded(engine, raw["vocab_size"], names, sizes.pages)
        stats = engine.stats()
    took = {"start_s": ready - begun, "answers_s": time.perf_counter() - ready}
    chosen = stats.implementations.get("all_gather", [])
    facts = {
        "compilations_after_warmup": stats.compilations_after_warmup,
        "preemptions": stats.preemptions,
        "adapter_swaps": stats.adapter_swaps,
        "all_gather": sorted({choice["implementation"] for choice in chosen}),
        **{name: round(seconds, 2) for name, seconds in took.items()},
    }
    answers = [answer(output) for output in outputs]
    facts["digest"] = hashlib.sha256(repr(answers).encode()).hexdigest()[:16]
    return Run(answers, facts)


def outputs_of(
    engine: Engine, vocab: int, names: list[str | None], longest: int
) -> list[RequestOutput]:
    """Return the answers to prompts of random lengths, with log-probabilities or drawn."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(4, vocab, n).tolist() for n in rng.integers(3, longest, REQUESTS)]
    asked = list(itertools.islice(itertools.cycle(names), REQUESTS))
    samplings = [SCORED if number % 3 else DRAWN for number in range(REQUESTS)]
    return engine.generate(prompts, asked, samplings)


def _crowded(
    engine: Engine, vocab: int, names: list[str | None], pages: int
) -> list[RequestOutput]:
    """Return long answers to short prompts: all are admitted, and outgrow the pages together."""
    rng = np.random.default_rng(6)
    prompts = rng.integers(4, vocab, (SEQUENCES, PAGE)).tolist()
    asked = list(itertools.islice(itertools.cycle(names), SEQUENCES))
    sampling = dataclasses.replace(SCORED, max_tokens=2 * min(pages, 64) * PAGE // SEQUENCES)
    return engine.generate(prompts, asked, sampling)


def answer(output: RequestOutput) -> tuple[Any, ...]:
    """Return all that a caller sees of a request."""
    first = output.outputs[0]
    return tuple(first.token_ids), first.logprobs, first.finish_reason, output.prompt_logprobs


def compare(one: Run, several: Run) -> dict[str, Any]:
    """Return whether all answers are equal, and how many tokens and whole answers are."""
    pairs = list(zip(one.answers, several.answers, strict=True))
    tokens = [
        (a, b) for x, y in pairs for a, b in itertools.zip_longest(x[0], y[0], fillvalue=None)
    ]
    return {
        "equal": all(x == y for x, y in pairs),
        "answers": len(pairs),
        "equal_answers": sum(x == y for x, y in pairs),
        "tokens": len(tokens),
        "equal_tokens": sum(a == b for a, b in tokens),
        "first_unequal": [_first_unequal(x[0], y[0]) for x, y in pairs if x != y],
    }


def _first_unequal(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Return the place of the first token that differs; -1 if only the rest of the answer does."""
    both = itertools.zip_longest(a, b, fillvalue=None)
    return next((place for place, (x, y) in enumerate(both) if x != y), -1)
