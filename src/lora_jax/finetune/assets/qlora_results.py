"""Perplexities of a base in 16 and 4 bits with LoRA trained over either, on held-out text.

    python -m lora_jax.finetune.assets.qlora_results --model assets/tiny-moe --data DIR --out FILE

DIR holds the ESFT evaluation sets (see make_assets). For each text and rank one adapter is
trained over the base as it is and one over its copy in NF4 with double quantisation, on the
training part of the text; each is then measured on the held-out part over both bases. Writes FILE
(JSON) and prints the table.
"""

import argparse
import datetime
import json
import pathlib
import platform
import sys
from collections.abc import Sequence
from typing import Any

from lora_jax.adapters.catalogue import UNQUANTISED
from lora_jax.finetune.assets.make_assets import HELDOUT_SHARE, LENGTH
from lora_jax.finetune.documents import Document, read_format
from lora_jax.finetune.esft_text import TASKS, read_domain, split
from lora_jax.finetune.frozen_base import load_base
from lora_jax.finetune.lora import default_modules, train_lora
from lora_jax.finetune.lora_params import LoraDelta, LoraSpec, trained_delta
from lora_jax.finetune.perplexity import Evaluator
from lora_jax.finetune.training import Schedule
from lora_jax.nn.decoder import AbstractCausalLM

NF4 = "nf4"
RANKS = (16, 32)
BASE = "no adapter"
Rows = dict[str, dict[str, float]]  # adapter -> precision of the base it is served over -> number


def measure_text(
    bases: dict[str, AbstractCausalLM],
    train: Sequence[Document],
    heldout: Sequence[Document],
    *,
    ranks: Sequence[int],
    schedule: Schedule,
    length: int = LENGTH,
) -> Rows:
    """Return held-out perplexities over each base: without an adapter, and with each trained one.

    An adapter's name is "rank R over FORMAT", the format being that of the base in its training.
    """
    catalogue = bases[UNQUANTISED].catalogue(bases[UNQUANTISED].config)
    deltas: dict[str, LoraDelta | None] = {BASE: None}
    for rank in ranks:
        spec = LoraSpec(rank, 2.0 * rank, default_modules(catalogue))
        for precision, model in bases.items():
            name = f"rank {rank} over {precision}"
            params = train_lora(model, train, length, spec, schedule, label=name)
            deltas[name] = trained_delta(params, spec, catalogue)
    rows: Rows = {name: {} for name in deltas}
    for precision, model in bases.items():
        evaluator = Evaluator(model, length)
        for name, delta in deltas.items():
            rows[name][precision] = round(evaluator.measure(heldout, delta).perplexity, 3)
    return rows


def table(texts: dict[str, Rows]) -> str:
    """Return the rows of all texts as markdown; the last column is NF4's loss."""
    lines = ["| text | adapter | 16-bit base | NF4 base | NF4 over 16 bits |", "|" + " --- |" * 5]
    for text, rows in texts.items():
        for name, of in rows.items():
            plain, coded = of[UNQUANTISED], of[NF4]
            shown = name.replace(f"over {UNQUANTISED}", "over 16 bits").replace("nf4", "NF4")
            change = f"{100 * (coded / plain - 1):+.1f}%"
            lines.append(f"| {text} | {shown} | {plain:.2f} | {coded:.2f} | {change} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    flags = argparse.ArgumentParser(prog="python -m lora_jax.finetune.assets.qlora_results")
    flags.add_argument("--model", type=pathlib.Path, required=True, help="a base in 16 bits")
    flags.add_argument("--data", type=pathlib.Path, required=True)
    flags.add_argument("--out", type=pathlib.Path, required=True, help="JSON file to write")
    flags.add_argument("--texts", nargs="+", choices=TASKS, default=tuple(TASKS))
    flags.add_argument("--steps", type=int, default=100)
    return flags


def main(argv: list[str]) -> None:
    """Run the command."""
    args = parser().parse_args(argv)
    schedule = Schedule(
        steps=args.steps,
        batch_rows=4,
        learning_rate=6e-3,
        warmup_steps=args.steps // 10,
        weight_decay=0.3,
    )
    scratch = args.out.parent
    bases = {
        UNQUANTISED: load_base(args.model, None, scratch)[0],
        NF4: load_base(args.model, NF4, scratch)[0],
    }
    form, texts = read_format(args.model), {}
    for text in args.texts:
        parts = split(read_domain(args.data, text), HELDOUT_SHARE, text)
        train, heldout = (form.documents(part, "chat") for part in (parts.train, parts.heldout))
        texts[text] = measure_text(bases, train, heldout, ranks=RANKS, schedule=schedule)
        write(args.out, texts, args.steps)
    print(table(texts))


def write(out: pathlib.Path, texts: dict[str, Rows], steps: int) -> None:
    """Write what is measured so far."""
    asked = f"--texts {' '.join(texts)} --steps {steps}"
    result: dict[str, Any] = {
        "command": f"python -m lora_jax.finetune.assets.qlora_results {asked}",
        "date": datetime.date.today().isoformat(),
        "device": f"{platform.machine()} CPU",
        "perplexity": texts,
    }
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
