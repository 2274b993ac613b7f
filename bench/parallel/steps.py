"""Steps of a model split over devices: decode at 64 rows, with and without adapters, and prompts.

`python -m bench.parallel steps --devices N --out DIR`. The model and its adapters are random and
made on the devices; programs are those of the engine's runner. One process measures one number of
devices and one way to split experts. Equal `base_tokens` (decode) and `prompt_tokens` mean that the
model without adapters drew the same tokens as on another number of devices. The adapters' numbers
are drawn by the widths of a device, so that they differ between numbers of devices: `bits` compares
answers behind adapters.
"""

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import numpy as np

from bench import decode_step
from bench.decode_step import ADAPTERS, GREEDY, PAGE_SIZE, RANK, Case
from bench.parallel.quiet import Quiet
from bench.step_profile import Kernels, longest, profile_step
from lora_jax.sharding import Split
from serving.api.request import Request, ScheduledChunk, Sequence, StepPlan
from serving.steps.compiling import compile_all
from serving.steps.model_runner import ModelRunner
from serving.steps.runner_parts import ProgramChoice, StepAdapters
from serving.steps.step import StepSizes
from serving.steps.step_programs import Program

BASE = Case("base", (-1,), GREEDY)
MIXED = Case(f"{ADAPTERS} adapters", tuple(range(ADAPTERS)), GREEDY)
CASES = (BASE, MIXED)
FEW_TURNS = (5, 8)  # turns, and steps of each: a step of prompts takes long


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Batches: rows that decode at a position, and prompts of a length that come in one step."""

    rows: int = 64
    position: int = 512
    prompts: int = 8
    prompt: int = 512

    @property
    def tokens(self) -> int:
        """Tokens of a step of prompts."""
        return self.prompts * self.prompt


@dataclasses.dataclass(frozen=True)
class Runners:
    """Two runners of one model: for decode steps and for prompts."""

    decode: ModelRunner
    prompts: ModelRunner | None


def make_runners(raw: dict[str, Any], sizes: Sizes, split: Split | None) -> Runners:
    """Make the model and adapters, and compile the programs that are measured, side by side."""
    model, config = decode_step.make_model(raw, split)
    slots = decode_step.linear_slots(model, config, split)

    def runner(rows: int, length: int, tokens: int) -> ModelRunner:
        pages = -(-(length + 2) // PAGE_SIZE)
        logit_rows = max(rows, 8)
        of_step = StepSizes(rows, pages * PAGE_SIZE, PAGE_SIZE, rows * pages, logit_rows, RANK)
        return ModelRunner(
            decode_step.step_model(model, config, split),
            of_step,
            ProgramChoice(tokens, base_only=True),
            StepAdapters(slots),
        )

    decode = runner(sizes.rows, sizes.position, sizes.rows)
    prompts = runner(sizes.prompts, sizes.prompt, sizes.tokens) if sizes.prompts else None
    lowered = list(decode.lowered([Program(sizes.rows, lora) for lora in (False, True)]))
    if prompts is not None:
        lowered += prompts.lowered([Program(sizes.tokens, lora) for lora in (False, True)])
    compile_all(lowered, [str(place) for place in range(len(lowered))], progress=False)
    return Runners(decode, prompts)


def prompt_plan(case: Case, runner: ModelRunner, vocab: int, sizes: Sizes) -> StepPlan:
    """Return a step of whole prompts."""
    rng, pages, chunks = np.random.default_rng(0), runner.sizes.max_pages, []
    for row in range(sizes.prompts):
        tokens = tuple(rng.integers(0, vocab, sizes.prompt).tolist())
        request = Request(str(row), tokens, case.sampling, None, "", lambda delta: None, 0.0, 0.0)
        sequence = Sequence(request, index=0, seed=row, token_ids=list(tokens), row=row)
        sequence.slot = case.slots[row % len(case.slots)]
        sequence.pages = list(range(row * pages, (row + 1) * pages))
        chunks.append(ScheduledChunk(sequence, 0, sizes.prompt, samples=True))
    return StepPlan(tuple(chunks), tuple(chunk.sequence for chunk in chunks))


def measure(
    raw: dict[str, Any],
    devices: int,
    expert_parallel: bool | None,
    sizes: Sizes,
    quiet: Quiet,
    *,
    profiled: bool = False,
) -> dict[str, Any]:
    """Return medians and turns of every case over so many devices, in ms, and what was loaded.

    With `profiled` also the kernels of each case: launches and us of one step on one device.
    """
    begun = time.perf_counter()
    split = decode_step.split_for(raw, devices, expert_parallel)
    runners = make_runners(raw, sizes, split)
    ready = time.perf_counter()
    vocab = raw["vocab_size"]
    with quiet.alone():
        where = (vocab, sizes.rows, sizes.position)
        plans = {c.name: decode_step.make_plan(c, runners.decode, *where) for c in CASES}
        turns = {f"decode, {n}": t for n, t in _turns(runners.decode, plans).items()}
        decode_step.start(runners.decode, plans[BASE.name])
        tokens = decode_step.digest(decode_step.sampled(runners.decode, plans[BASE.name]))
        prompts, prompt_tokens = {}, None
        if runners.prompts is not None:
            prompts = {c.name: prompt_plan(c, runners.prompts, vocab, sizes) for c in CASES}
            found = _turns(runners.prompts, prompts, *FEW_TURNS)
            turns |= {f"prompts, {name}": took for name, took in found.items()}
            decode_step.start(runners.prompts, prompts[BASE.name])
            last = decode_step.sampled(runners.prompts, prompts[BASE.name])
            prompt_tokens = decode_step.digest(last)
        profiles = _profiles(runners, plans, prompts, devices) if profiled else {}
    if split is not None:
        split.check()
    return {
        "devices": devices,
        "experts": None if split is None or "num_experts" not in raw else split.experts,
        "attention_output": None if split is None else split.attention_output,
        "exchange": None if split is None else "own" if split.group else "jax.lax.all_gather",
        "sizes": dataclasses.asdict(sizes),
        "adapters": ADAPTERS,
        "rank": RANK,
        "base_tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "ms": {name: round(statistics.median(took), 4) for name, took in turns.items()},
        "kernels": profiles,
        "turns_ms": {name: [round(t, 4) for t in took] for name, took in turns.items()},
        "made_and_compiled_s": round(ready - begun, 1),
        "gib_in_use": [round(used / 2**30, 2) for used in _bytes_in_use(devices)],
    }


def _turns(runner: ModelRunner, plans: dict[str, StepPlan], *how: int) -> dict[str, list[float]]:
    for plan in plans.values():
        decode_step.start(runner, plan)
    return decode_step.take_turns(runner, plans, *how)


def _profiles(
    runners: Runners, decode: dict[str, StepPlan], prompts: dict[str, StepPlan], devices: int
) -> dict[str, Kernels]:
    """Return (launches, us) of the kernels that take longest in a step, by case and name."""
    found, both = {}, [("decode", runners.decode, decode)]
    if runners.prompts is not None:
        both.append(("prompts", runners.prompts, prompts))
    for what, runner, plans in both:
        for name, plan in plans.items():
            decode_step.start(runner, plan)
            kernels = profile_step(functools.partial(decode_step.sampled, runner, plan))
            found[f"{what}, {name}"] = longest(kernels, devices)
    return found


def _bytes_in_use(devices: int) -> list[int]:
    """Return the peak bytes of each device; 0 where nobody counts."""
    stats = [device.memory_stats() or {} for device in jax.devices()[:devices]]
    return [s.get("peak_bytes_in_use", 0) for s in stats]
