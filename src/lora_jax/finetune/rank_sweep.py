"""Smallest LoRA rank that meets a quality bar, found by halving or doubling.

    python -m lora_jax.finetune.rank_sweep --model assets/tiny-moe --data DATA

DATA is a .jsonl or .jsonl.gz file with `prompt` and `answer` on every line, or a folder of the
ESFT evaluation sets (see make_assets), of which --text names one. An adapter of rank 16 is trained
on a part of the text and measured on the rest, which is held out. If it meets the bar, the rank is
halved until one does not; otherwise it is doubled until one does. The bar is a perplexity: given
by --perplexity, or the share --bar of what rank 16 gains over the base, in nats a token. Prints the
table of all ranks tried; --out writes it as JSON.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lora_jax.adapters.slots import rows_per_adapter
from lora_jax.finetune.assets.make_assets import HELDOUT_SHARE, LENGTH
from lora_jax.finetune.documents import Document, read_format
from lora_jax.finetune.esft_text import TASKS, Split, read_domain, split
from lora_jax.finetune.lora import default_modules, train_lora
from lora_jax.finetune.lora_params import LoraSpec, trained_delta
from lora_jax.finetune.perplexity import Evaluator
from lora_jax.finetune.records import read_jsonl
from lora_jax.finetune.training import Schedule
from lora_jax.models import load
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.rank_rows import rows_nbytes

START = 16
_BYTES = 2  # of a value as adapters are served, in bfloat16


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Perplexity by rank, in the order tried, and the smallest rank that meets the bar, if any."""

    bar: float
    perplexity: dict[int, float]
    chosen: int | None


def sweep(
    measure: Callable[[int], float],
    bar_of: Callable[[float], float],
    *,
    start: int = START,
    lowest: int = 1,
    highest: int = 256,
) -> Sweep:
    """Return the ranks tried from `start` on, halved while they meet the bar, else doubled.

    `measure` returns a rank's perplexity, `bar_of` the bar, given that of `start`.
    """
    check_ranks(start, lowest, highest)
    tried = {start: measure(start)}
    bar = bar_of(tried[start])
    rank, shrinks = start, tried[start] <= bar
    while lowest <= (rank := rank // 2 if shrinks else rank * 2) <= highest:
        tried[rank] = measure(rank)
        if (tried[rank] <= bar) != shrinks:
            break
    meeting = [rank for rank, perplexity in tried.items() if perplexity <= bar]
    return Sweep(bar, tried, min(meeting, default=None))


def share_of_gain(share: float, base: float) -> Callable[[float], float]:
    """Return a bar: so large a share of an adapter's gain over the base, in nats a token."""
    return lambda adapted: math.exp(math.log(base) - share * math.log(base / adapted))


def trained_perplexity(
    model: AbstractCausalLM,
    train: Sequence[Document],
    heldout: Sequence[Document],
    schedule: Schedule,
    length: int = LENGTH,
) -> tuple[float, Callable[[int], float]]:
    """Return the base's held-out perplexity, and what trains an adapter and returns its own."""
    catalogue, evaluator = model.catalogue(model.config), Evaluator(model, length)

    def measure(rank: int) -> float:
        spec = LoraSpec(rank, 2.0 * rank, default_modules(catalogue))
        params = train_lora(model, train, length, spec, schedule, label=f"rank {rank}")
        return evaluator.measure(heldout, trained_delta(params, spec, catalogue)).perplexity

    return evaluator.measure(heldout).perplexity, measure


def table(found: Sweep, base: float, num_bytes: Callable[[int], int]) -> str:
    """Return the ranks tried as markdown, the smallest first."""
    lines = ["| rank | bytes in bfloat16 | perplexity | meets the bar |", "|" + " --- |" * 4]
    lines.append(f"| no adapter | 0 | {base:.3f} | |")
    for rank, perplexity in sorted(found.perplexity.items()):
        meets = "yes" if perplexity <= found.bar else "no"
        chosen = ", smallest" if rank == found.chosen else ""
        lines.append(f"| {rank} | {num_bytes(rank):,} | {perplexity:.3f} | {meets}{chosen} |")
    lines.append(f"\nBar: perplexity {found.bar:.3f}.")
    return "\n".join(lines)


def check_ranks(start: int, lowest: int, highest: int) -> None:
    """Raise ValueError unless a sweep may begin with `start`."""
    if not 1 <= lowest <= start <= highest:
        raise ValueError(f"Ranks from {lowest} to {highest} must hold the first one, {start}.")


def check_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for a quality bar, steps or an output file that cannot be.

    Training takes long: nothing may be found out after it.
    """
    if not 0 < args.bar <= 1:
        raise ValueError(f"--bar must be a fraction above 0 and at most 1, got {args.bar:g}.")
    if args.perplexity is not None and not 1 <= args.perplexity < math.inf:
        raise ValueError(f"--perplexity must be a number of at least 1, got {args.perplexity:g}.")
    if args.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {args.steps}.")
    if args.out is not None and not args.out.parent.is_dir():
        raise ValueError(f"--out: there is no folder {str(args.out.parent)!r}; make it first.")


def parts_of(data: pathlib.Path, text: str) -> Split:
    """Return the records of a file, or of one of ESFT's evaluation sets, in two parts.

    Raises OSError, and ValueError for other files and where a part would be empty.
    """
    if data.is_dir():
        parts = split(read_domain(data, text), HELDOUT_SHARE, text)
    else:
        parts = split(read_jsonl(data), HELDOUT_SHARE, "")
    if not (parts.train and parts.heldout):
        raise ValueError(
            f"{data.name} has too few records: {len(parts.train)} to train on and "
            f"{len(parts.heldout)} held out."
        )
    return parts


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    flags = argparse.ArgumentParser(
        prog="python -m lora_jax.finetune.rank_sweep",
        description="Find the smallest LoRA rank that is good enough: train an adapter of rank "
        "--start, halve the rank while the adapter meets the bar, else double it until one does. "
        "The table has bytes, perplexity on held-out text and verdict of each rank tried.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    needed = {"type": pathlib.Path, "required": True, "default": argparse.SUPPRESS}
    flags.add_argument("--model", help="folder of a base model in 16 bits", **needed)
    data = "text to train and judge on: a .jsonl or .jsonl.gz file, or ESFT's evaluation sets"
    flags.add_argument("--data", help=data, **needed)
    text = "set of a folder --data to train and judge on"
    flags.add_argument("--text", choices=TASKS, default="intent", help=text)
    flags.add_argument("--steps", type=int, default=100, help="training steps of each rank")
    flags.add_argument("--start", type=int, default=START, help="first rank")
    flags.add_argument("--lowest", type=int, default=1, help="smallest rank to try")
    flags.add_argument("--highest", type=int, default=64, help="largest rank to try")
    flags.add_argument(
        "--bar",
        type=float,
        default=0.95,
        help="fraction of the gain of --start over the base, in nats a token, that a rank keeps",
    )
    flags.add_argument("--perplexity", type=float, help="highest perplexity, instead of --bar")
    flags.add_argument("--out", type=pathlib.Path, help="JSON file to write")
    return flags


def main(argv: list[str]) -> None:
    """Run the command."""
    flags = parser()
    args = flags.parse_args(argv)
    try:
        check_ranks(args.start, args.lowest, args.highest)
        check_flags(args)
        parts = parts_of(args.data, args.text)
        model, config = load(args.model, dtype="float32")
    except (OSError, ValueError) as error:
        flags.error(str(error))
    warmup = args.steps // 10
    schedule = Schedule(args.steps, 4, 6e-3, warmup_steps=warmup, weight_decay=0.3)
    form = read_format(args.model)
    train, heldout = (form.documents(part, "chat") for part in (parts.train, parts.heldout))
    base, measure = trained_perplexity(model, train, heldout, schedule)
    bar_of = share_of_gain(args.bar, base)
    if args.perplexity is not None:
        bar_of = lambda _: args.perplexity  # noqa: E731
    ranks = {"start": args.start, "lowest": args.lowest, "highest": args.highest}
    found, catalogue = sweep(measure, bar_of, **ranks), model.catalogue(config)
    print(table(found, base, lambda rank: rows_nbytes(rows_per_adapter(catalogue, rank), _BYTES)))
    if args.out is not None:
        result: dict[str, Any] = {"base": base, **dataclasses.asdict(found)}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
