"""Trains a LoRA adapter of a base model and writes it as PEFT does.

    python -m lora_jax.finetune.lora --model DIR --data FILE [FILE ...] --rank 8 --out DIR

DATA is .jsonl or .jsonl.gz with `prompt` and `answer` on every line. Run again after an
interruption, the command goes on from its newest checkpoint.

With --quantization nf4 the base is frozen in NF4 with double quantisation (QLoRA): its maps stay
in 4 bits in memory. A base whose files are quantised is trained over as it is. The adapter's file
notes the format, and a server of the base in another one warns.
"""

import argparse
import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

from lora_jax.adapters.catalogue import LoraCatalogue
from lora_jax.finetune.command import documents_of, run, schedule_of, state_of, training_parser
from lora_jax.finetune.documents import Document
from lora_jax.finetune.forward import forward
from lora_jax.finetune.frozen_base import load_base
from lora_jax.finetune.lora_params import LoraParams, LoraSpec, init_lora, trained_delta
from lora_jax.finetune.packing import Rows, pack
from lora_jax.finetune.peft_export import save_adapter
from lora_jax.finetune.training import Schedule, fit, mean_loss
from lora_jax.models.quantised.encode import FORMATS
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Array, Float

log = logging.getLogger(__name__)

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def default_modules(catalogue: LoraCatalogue) -> tuple[str, ...]:
    """Return every module but router and head: attention, MLPs, experts."""
    return tuple(n for n in catalogue.module_names if n not in ("router", "lm_head"))


def train_lora(
    model: AbstractCausalLM,
    documents: Sequence[Document],
    length: int,
    spec: LoraSpec,
    schedule: Schedule,
    *,
    answer_only: bool = False,
    folder: pathlib.Path | None = None,
    stop_after: int | None = None,
    label: str = "lora",
) -> LoraParams:
    """Return LoRA trained on a model that computes in float32 and whose weights stay as they are.

    `folder` takes checkpoints and the loss log; a run that was stopped goes on from there.
    """
    catalogue = model.catalogue(model.config)
    graphdef, state = nnx.split(model, graph=False)

    def loss(params: LoraParams, state: Any, batch: Rows) -> Float[Array, ""]:
        merged = nnx.merge(graphdef, state)
        delta = trained_delta(params, spec, catalogue)
        out = forward(merged, batch.tokens, batch.positions, batch.segments, delta)
        return mean_loss(out.logits, batch.targets, batch.weights)

    text = pack(documents, length, answer_only=answer_only)
    start = init_lora(spec, catalogue, schedule.seed)
    return fit(
        start, state, loss, text, schedule, folder=folder, stop_after=stop_after, label=label
    )


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    flags = training_parser("lora", __doc__ or "", learning_rate=2e-3)
    add = flags.add_argument
    add("--rank", type=int, default=8)
    add("--alpha", type=float, help="LoRA alpha (default: twice the rank)")
    add("--rslora", action="store_true", help="scale by alpha / sqrt(rank)")
    add("--modules", nargs="+", help="modules with LoRA (default: all but router and lm_head)")
    add("--per-expert", action="store_true", help="one A and B per expert's matrix, not fused")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="data type of the adapter's file")
    add("--quantization", choices=FORMATS, help="freeze a 16-bit base in this format")
    return flags


def main(argv: list[str]) -> None:
    """Run the command."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    model, config, quantization = load_base(args.model, args.quantization, args.out.parent)
    catalogue = model.catalogue(config)
    spec = LoraSpec(
        rank=args.rank,
        alpha=2.0 * args.rank if args.alpha is None else args.alpha,
        modules=tuple(args.modules or default_modules(catalogue)),
        use_rslora=args.rslora,
        fused_experts=not args.per_expert,
    )
    documents, state = documents_of(args), state_of(args)
    state = state / args.quantization if args.quantization else state
    log.info("%d records, %s, base in %s", len(documents), spec, quantization)
    params = train_lora(
        model,
        documents,
        args.length,
        spec,
        schedule_of(args),
        answer_only=args.answer_only,
        folder=state,
    )
    save_adapter(
        args.out,
        params,
        spec,
        catalogue,
        base_name=args.model.resolve().name,
        dtype=DTYPES[args.dtype],
        quantization=quantization,
    )
    log.info("wrote %s; its training is in %s", args.out, state)


if __name__ == "__main__":
    run(main)
