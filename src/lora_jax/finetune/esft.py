"""Trains the experts that a text needs most, and writes them as ESFT does.

    python -m lora_jax.finetune.esft --model DIR --data FILE [FILE ...] --score token --out DIR

DATA is .jsonl or .jsonl.gz with `prompt` and `answer` on every line. The base model's routing of
it gives every expert a score, the experts that reach --top-p are trained, and all else stays as
it is. Run again after an interruption, the command goes on from its newest checkpoint.
"""

import argparse
import json
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

from flax import nnx

from lora_jax.finetune.command import documents_of, run, schedule_of, state_of, training_parser
from lora_jax.finetune.documents import Document
from lora_jax.finetune.esft_export import save_esft
from lora_jax.finetune.esft_params import EsftParams, chosen_experts, with_experts
from lora_jax.finetune.esft_scores import (
    CONFIG_FILE,
    KINDS,
    Selection,
    expert_config,
    select_experts,
    summary,
    write_config,
)
from lora_jax.finetune.forward import forward
from lora_jax.finetune.packing import Rows, pack
from lora_jax.finetune.routing import collect_routing
from lora_jax.finetune.training import Schedule, fit, mean_loss
from lora_jax.models import load
from lora_jax.models.loader import read_config
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Array, Float

log = logging.getLogger(__name__)

TOP_P = {"token": 0.2, "gate": 0.1}  # as ESFT's authors; 0.2 gives their released configs


def choose(
    model: AbstractCausalLM,
    documents: Sequence[Document],
    length: int,
    score: str,
    top_p: float,
    folder: pathlib.Path | None = None,
) -> Selection:
    """Return the experts whose scores on the documents reach top_p, per layer.

    With a folder, both scores of every expert are written to folder/summary.json.
    """
    totals = collect_routing(model, documents, length)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(summary(totals)) + "\n"
        (folder / "summary.json").write_text(text, encoding="utf-8")
    return select_experts({layer: t.scores(score) for layer, t in totals.items()}, top_p)


def train_esft(
    model: AbstractCausalLM,
    documents: Sequence[Document],
    length: int,
    selection: Selection,
    schedule: Schedule,
    *,
    answer_only: bool = False,
    folder: pathlib.Path | None = None,
    stop_after: int | None = None,
    label: str = "esft",
) -> EsftParams:
    """Return the chosen experts of a float32 model after training; the model stays as it is.

    `folder` takes checkpoints and the loss log; a run that was stopped goes on from there.
    """
    start = chosen_experts(model, selection)
    if folder:
        claim(folder, selection)
    graphdef, state = nnx.split(model, graph=False)

    def loss(params: EsftParams, state: Any, batch: Rows) -> Float[Array, ""]:
        merged = with_experts(graphdef, state, params, selection)
        out = forward(merged, batch.tokens, batch.positions, batch.segments)
        return mean_loss(out.logits, batch.targets, batch.weights)

    text = pack(documents, length, answer_only=answer_only)
    return fit(
        start, state, loss, text, schedule, folder=folder, stop_after=stop_after, label=label
    )


def claim(folder: pathlib.Path, selection: Selection) -> None:
    """Write the selection into the folder; ValueError if a run with another one began there."""
    file = folder / CONFIG_FILE
    if file.exists() and json.loads(file.read_text(encoding="utf-8")) != expert_config(selection):
        raise ValueError(f"{folder.name} holds a run with other experts: {file.read_text()}")
    write_config(folder, selection)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    flags = training_parser("esft", __doc__ or "", learning_rate=1e-3)
    flags.add_argument(
        "--score",
        choices=KINDS,
        default="token",
        help="score of an expert: share of tokens, or mean gate",
    )
    flags.add_argument(
        "--top-p",
        type=float,
        help="fraction of scores to reach (default: 0.2 for token, 0.1 for gate)",
    )
    return flags


def main(argv: list[str]) -> None:
    """Run the command."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    quantization = read_config(args.model).quantization
    if quantization is not None:
        raise ValueError(
            f"{args.model.name} is quantised ({quantization.method}); an ESFT adapter replaces "
            "experts of a base in 16 bits. Train over that one."
        )
    model, _ = load(args.model, dtype="float32")
    documents, state = documents_of(args), state_of(args)
    top_p = TOP_P[args.score] if args.top_p is None else args.top_p
    selection = choose(model, documents, args.length, args.score, top_p, state)
    experts = sum(len(chosen) for chosen in selection.values())
    log.info("%d records, %d experts in %d layers", len(documents), experts, len(selection))
    params = train_esft(
        model,
        documents,
        args.length,
        selection,
        schedule_of(args),
        answer_only=args.answer_only,
        folder=state,
    )
    save_esft(args.out, params, selection)
    log.info("wrote %s; its training is in %s", args.out, state)


if __name__ == "__main__":
    run(main)
