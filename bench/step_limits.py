"""Times of decode steps and of prompts beside the limits of the device's memory and arithmetic.

`python -m bench.step_limits --model llama-3.1-8b --rows 1 64 256 --prompts 4 --out DIR` makes the
shape with random weights on the device and runs the engine's programs for rows without adapters;
with `--adapters` also those in which eight adapters of rank 16 take turns. Rows decode at one
position of prompts of their own; a step of prompts has all of its tokens. A line has, for one step:

- ms by the clock from one step's results to the next's, and the sum of its kernels by the profiler.
  What is between the two is gaps between kernels and time in which the device waits for the host;
- the limit of the base model: the time in which a copy on this card moves the bytes of the weights
  and cached keys and values, or, of prompts, the time of the products at the card's dense rate
  (`end_to_end.limits` has both rates), and how much of the step it is;
- the kinds of kernels, the kernels that take longest, and the launches of one layer in order.
"""

import argparse
import dataclasses
import functools
import itertools
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import decode_step, record
from bench.decode_step import PAGE_SIZE, RANK, TINY, Case
from bench.end_to_end.limits import CARDS, Card, Limits
from bench.launch_order import launches_of, layer_of, show_layer
from bench.parallel.shapes import SPEED, tiny
from bench.parallel.steps import BASE, MIXED, Sizes, prompt_plan
from bench.step_profile import Kernels, longest, profile_step, show_profile
from serving.api.request import StepPlan
from serving.steps.compiling import compile_all
from serving.steps.model_runner import ModelRunner
from serving.steps.runner_parts import ProgramChoice, StepAdapters, StepModel
from serving.steps.step import StepSizes
from serving.steps.step_programs import Program

PROMPT_TURNS = (5, 8)  # turns, and steps of each: a step of prompts takes long


@dataclasses.dataclass(frozen=True)
class Step:
    """A program with the plan that it runs, and the limit of its time in ms, if it is known."""

    name: str
    runner: ModelRunner
    plan: StepPlan
    limit_ms: float | None
    turns: tuple[int, ...] = ()
    lora: bool = False

    @property
    def program(self) -> Program:
        """The program that the step runs: the one that an engine of as many rows would take."""
        tokens = sum(chunk.num_tokens for chunk in self.plan.chunks)
        return Program(min(b for b in self.runner.buckets if b >= tokens), lora=self.lora)


def runner_of(
    model: Any, config: Any, slots: Any, rows: int, length: int, room: int, tokens: int
) -> ModelRunner:
    """Return a runner of steps of up to `tokens` tokens, of sequences of up to `length`.

    Its block tables have room for sequences of `room` tokens, as a server's do.
    """
    pages = -(-length // PAGE_SIZE)
    sizes = StepSizes(
        max_seqs=rows,
        max_len=max(room, pages * PAGE_SIZE),
        page_size=PAGE_SIZE,
        num_pages=rows * pages,
        max_logit_rows=max(rows, 8),  # as many as a step of few rows pads to
        max_rank=RANK,
        reads_rows=True,
    )
    return ModelRunner(
        StepModel(model, model.kv_shape(config), config.vocab_size, jnp.dtype(jnp.bfloat16)),
        sizes,
        ProgramChoice(tokens, base_only=True),
        StepAdapters(slots),
    )


def with_pages(plan: StepPlan, length: int) -> StepPlan:
    """Return the plan, its sequences having the pages of `length` tokens and no more."""
    pages = -(-length // PAGE_SIZE)
    for row, chunk in enumerate(plan.chunks):
        chunk.sequence.pages = list(range(row * pages, (row + 1) * pages))
    return plan


def suffix(case: Case) -> str:
    """Return what a step's name says of a case besides its rows."""
    return "" if case is BASE else f", {case.name}"


def make_steps(raw: dict[str, Any], args: argparse.Namespace, card: Card | None) -> list[Step]:
    """Make the model and the steps that `args` asks for, and compile their programs."""
    model, config = decode_step.make_model(raw)
    slots = decode_step.linear_slots(model, config) if args.adapters else None
    cases = (BASE, MIXED) if args.adapters else (BASE,)
    limits, vocab, steps = card and Limits(raw, card), raw["vocab_size"], []
    if args.rows:
        length, most = args.position + 2, max(args.rows)
        runner = runner_of(model, config, slots, most, length, args.room, most)
        for rows, case in itertools.product(args.rows, cases):
            plan = decode_step.make_plan(case, runner, vocab, rows, args.position)
            limit = limits and 1e3 * limits.step_s(rows, args.position)
            name = f"{rows} rows{suffix(case)}"
            steps.append(Step(name, runner, with_pages(plan, length), limit, (), case is MIXED))
    if args.prompts:
        sizes = Sizes(prompts=args.prompts, prompt=args.prompt)
        length = sizes.prompt + 2
        runner = runner_of(model, config, slots, args.prompts, length, args.room, sizes.tokens)
        limit = limits and 1e3 * sizes.tokens * limits.prompt_token_s(sizes.prompt)
        for case in cases:
            plan = with_pages(prompt_plan(case, runner, vocab, sizes), length)
            name = f"{sizes.prompts} prompts of {sizes.prompt}{suffix(case)}"
            steps.append(Step(name, runner, plan, limit, PROMPT_TURNS, case is MIXED))
    lowered = [program for step in steps for program in step.runner.lowered([step.program])]
    compile_all(lowered, [str(place) for place in range(len(lowered))], progress=False)
    return steps


def measure(step: Step, *, profiled: bool) -> dict[str, Any]:
    """Return a step's times in ms and its kernels, as (launches, us) by name."""
    decode_step.start(step.runner, step.plan)
    turns = decode_step.take_turns(step.runner, {step.name: step.plan}, *step.turns)[step.name]
    clock, kernels, layer = statistics.median(turns), {}, ([], 0.0)
    if profiled:
        again = functools.partial(decode_step.sampled, step.runner, step.plan)
        kernels, layer = profile_step(again), layer_of(launches_of(again))
        print(show_profile(step.name, kernels))
        print(show_layer(*layer))
    row = as_row(clock, kernels, step.limit_ms) | {"turns_ms": [round(t, 4) for t in turns]}
    in_order = [(launch.name, round(launch.us, 2)) for launch in layer[0]]
    return row | {"layer_us": round(layer[1], 1), "layer": in_order}


def as_row(clock: float, kernels: Kernels, limit_ms: float | None) -> dict[str, Any]:
    """Return what a step's line says, times in ms; None for what is not known."""
    total = sum(us for _, us in kernels.values()) / 1e3 or None
    return {
        "ms": round(clock, 4),
        "kernels_ms": total and round(total, 4),
        "between_ms": total and round(clock - total, 4),
        "launches": round(sum(n for n, _ in kernels.values()), 1),
        "limit_ms": limit_ms and round(limit_ms, 4),
        "limit_over_ms": limit_ms and round(limit_ms / clock, 3),
        "kernels": longest(kernels),
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the command's arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench.step_limits", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON file")
    parser.add_argument("--model", choices=SPEED, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="the shape's first layers only")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--position", type=int, default=512, help="of the rows that decode")
    parser.add_argument("--prompts", type=int, default=4, help="in one step; 0: none")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--adapters", action="store_true", help="also rows with eight adapters")
    parser.add_argument("--room", type=int, default=0, help="longest sequence that has room")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a CPU")
    args = parser.parse_args(argv)
    if not args.rows and not args.prompts:
        parser.error("--rows or --prompts must name a step")
    return args


def main() -> None:
    """Measure, print and write."""
    args, about = parse(), record.about()
    if not args.tiny:
        record.need_gpu("--tiny runs on a CPU.")
    raw = SPEED[args.model] | ({"num_hidden_layers": args.layers} if args.layers else {})
    raw = tiny(raw) | {"num_experts": TINY["num_experts"]} if args.tiny else raw
    device = record.jax_device()
    rows = {}
    for step in make_steps(raw, args, CARDS.get(device)):
        rows[step.name] = found = measure(step, profiled=jax.default_backend() != "cpu")
        hidden = "kernels", "turns_ms", "layer"
        shown = {key: value for key, value in found.items() if key not in hidden}
        print(step.name, shown, flush=True)
    name = f"step_limits_{args.model}_{record.in_file_name(device)}_{about['date']}"
    about |= {"device": device, "model": args.model, "layers": raw["num_hidden_layers"]}
    about |= {"position": args.position, "rows": rows}
    record.write(args.out / f"{name}.json", about)


if __name__ == "__main__":
    main()
