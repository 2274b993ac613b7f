"""Trains a task head of a base model and writes it as a PEFT adapter.

    python -m lora_jax.finetune --head class --model DIR --data FILE --eval FILE --out DIR

DATA is .jsonl or .jsonl.gz with `prompt` and `label` on every line (of a count a number), for
--head multi_label with `labels`. The head reads the state of the prompt's last token. LoRA below
it is trained with it; --rank 0 trains the head alone, and --adapter DIR a head for an adapter that
stays as it is, which then has both. With --eval the share of right answers of held-out text is
told.
"""

import argparse
import dataclasses
import json
import logging
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.task_head import HeadKind, TaskHead
from lora_jax.finetune.command import existing_file, run, schedule_of, state_of, training_parser
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.forward import states
from lora_jax.finetune.frozen_base import load_base
from lora_jax.finetune.head_export import add_head, copy_adapter
from lora_jax.finetune.head_states import StateBatch, StateRows, state_rows
from lora_jax.finetune.labelled import Examples, examples_of, head_of, read_labelled
from lora_jax.finetune.lora import DTYPES, default_modules
from lora_jax.finetune.lora_params import (
    LoraDelta,
    LoraParams,
    LoraSpec,
    init_lora,
    loaded_delta,
    trained_delta,
)
from lora_jax.finetune.packing import Rows, pack
from lora_jax.finetune.peft_export import save_adapter
from lora_jax.finetune.training import Schedule, fit
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Array, Float

log = logging.getLogger(__name__)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadParams:
    """A head as it is trained, in float32, and the LoRA that is trained below it, if any is."""

    weight: Float[Array, "labels hidden"]
    bias: Float[Array, "labels"]
    lora: LoraParams

    def logits(self, x: Float[Array, "places hidden"]) -> Float[Array, "places labels"]:
        """Return the head's float32 logits of states."""
        return jnp.einsum("ti,li->tl", x.astype(jnp.float32), self.weight) + self.bias[None]


def init_head(head: TaskHead, hidden: int, lora: LoraParams) -> HeadParams:
    """Return a head that finds all labels equally likely."""
    weight = jnp.zeros((head.size, hidden), jnp.float32)
    return HeadParams(weight, jnp.zeros(head.size, jnp.float32), lora)


def head_loss(
    logits: Float[Array, "places labels"],
    wanted: Float[Array, "places labels"],
    weights: Float[Array, "places"],
    kind: HeadKind,
) -> Float[Array, ""]:
    """Return the mean cross entropy in nats over places of weight 1; of multi_label a label's."""
    if kind is HeadKind.MULTI_LABEL:
        losses = jnp.mean(jax.nn.softplus(logits) - logits * wanted, axis=-1)
    else:
        losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * wanted, axis=-1)
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def train_above_lora(
    model: AbstractCausalLM,
    examples: Examples,
    length: int,
    head: TaskHead,
    spec: LoraSpec,
    schedule: Schedule,
    *,
    folder: pathlib.Path | None = None,
) -> HeadParams:
    """Return a head and the LoRA below it, trained together; the model stays as it is."""
    catalogue = model.catalogue(model.config)
    graphdef, state = nnx.split(model, graph=False)
    wanted = jnp.asarray(examples.wanted)

    def loss(params: HeadParams, state: Any, batch: Rows) -> Float[Array, ""]:
        merged, delta = nnx.merge(graphdef, state), trained_delta(params.lora, spec, catalogue)
        x, _ = states(merged, batch.tokens, batch.positions, batch.segments, delta)
        weights, targets = batch.weights.reshape(-1), batch.targets.reshape(-1)
        rows = jnp.where(weights > 0, targets, 0)  # other targets are tokens
        return head_loss(params.logits(x), wanted[rows], weights, head.kind)

    lora = init_lora(spec, catalogue, schedule.seed)
    start = init_head(head, model.config.hidden_size, lora)
    text = pack(examples.documents, length, answer_only=True)
    return fit(start, state, loss, text, schedule, folder=folder, label="head")


def train_above_states(
    states: StateRows,
    examples: Examples,
    head: TaskHead,
    schedule: Schedule,
    *,
    folder: pathlib.Path | None = None,
) -> HeadParams:
    """Return a head trained on states that stay as they are."""
    wanted = jnp.asarray(examples.wanted)

    def loss(params: HeadParams, frozen: Any, batch: StateBatch) -> Float[Array, ""]:
        del frozen
        ones = jnp.ones(batch.wanted.shape, jnp.float32)
        return head_loss(params.logits(batch.states), wanted[batch.wanted], ones, head.kind)

    start = init_head(head, states.states.shape[1], {})
    return fit(start, None, loss, states, schedule, folder=folder, label="head")


def right_share(params: HeadParams, states: StateRows, examples: Examples, head: TaskHead) -> float:
    """Return the share of examples of which the head says all labels and no other."""
    logits, right = np.asarray(params.logits(jnp.asarray(states.states))), 0
    for row, one in zip(states.wanted, logits, strict=True):
        wanted = {head.labels[n] for n in np.flatnonzero(examples.wanted[row])}
        right += set(head.answer(one).labels) == wanted
    return right / len(states.wanted)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    flags = training_parser("head", __doc__ or "", learning_rate=2e-3)
    add = flags.add_argument
    add("--head", type=_kind, required=True, help="kind of the head: class, multi_label or count")
    add("--eval", type=existing_file, help="held-out records, in the format of --data")
    add("--adapter", type=_adapter, help="adapter that gets the head; its LoRA stays as it is")
    add("--rank", type=int, default=8, help="rank of the LoRA below the head; 0: a head alone")
    add("--alpha", type=float, help="LoRA alpha (default: twice the rank)")
    add("--modules", nargs="+", help="modules with LoRA (default: all but router and lm_head)")
    add("--dtype", choices=tuple(DTYPES), default="float32", help="data type of the adapter's file")
    return flags


def _kind(text: str) -> HeadKind:
    """Return the kind of a head of text, or raise what argparse turns into its message."""
    kinds = [kind for kind in HeadKind if kind is not HeadKind.BOXES]
    if text not in kinds:
        boxes = "; heads of boxes: python -m lora_jax.finetune.pictures.adapter"
        more = boxes if text == HeadKind.BOXES else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(kinds)}{more}")
    return HeadKind(text)


def _adapter(text: str) -> pathlib.Path:
    """Return an adapter's folder, or raise what argparse turns into its message."""
    path = pathlib.Path(text)
    if not (path / "adapter_config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no folder with adapter_config.json")
    return path


def main(argv: list[str]) -> None:
    """Run the command."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    records = [record for path in args.data for record in read_labelled(path, args.head)]
    head, form = head_of(records, args.head), read_format(args.model)
    settings = (head, form, args.style, args.length)
    examples, state = examples_of(records, *settings), state_of(args)
    held = (
        None if args.eval is None else examples_of(read_labelled(args.eval, args.head), *settings)
    )
    model, config, quantization = load_base(args.model, None, args.out.parent)
    log.info("%d records, %s of %d labels", len(records), head.kind, len(head.labels))
    catalogue, schedule, delta = model.catalogue(config), schedule_of(args), None
    dtype, spec = DTYPES[args.dtype], no_lora()
    if args.adapter is not None:
        delta = loaded_delta(peft_format.read(args.adapter, catalogue))
    if args.adapter is not None or not args.rank:
        states = state_rows(model, examples, args.length, delta)
        params = train_above_states(states, examples, head, schedule, folder=state)
    else:
        alpha = 2.0 * args.rank if args.alpha is None else args.alpha
        spec = LoraSpec(args.rank, alpha, tuple(args.modules or default_modules(catalogue)))
        given = (model, examples, args.length, head, spec, schedule)
        params = train_above_lora(*given, folder=state)
        delta = trained_delta(params.lora, spec, catalogue)
    if args.adapter is not None:
        copy_adapter(args.adapter, args.out)
    else:
        name = args.model.resolve().name
        more: dict[str, Any] = {"dtype": dtype, "quantization": quantization}
        save_adapter(args.out, params.lora, spec, catalogue, base_name=name, **more)
    add_head(args.out, head, np.asarray(params.weight), np.asarray(params.bias), dtype)
    log.info("wrote %s; its training is in %s", args.out, state)
    if held is not None:
        tell_score(model, params, held, head, delta, args.length, state)


def no_lora() -> LoraSpec:
    """Return what a head without LoRA of its own is saved with."""
    return LoraSpec(rank=1, alpha=1.0, modules=(), fused_experts=False)


def tell_score(
    model: AbstractCausalLM,
    params: HeadParams,
    held: Examples,
    head: TaskHead,
    delta: LoraDelta | None,
    length: int,
    state: pathlib.Path,
) -> None:
    """Log the share of right answers of held-out text, and write it to heldout.json."""
    share = right_share(params, state_rows(model, held, length, delta), held, head)
    score = {"right": round(share, 4), "examples": len(held.documents)}
    (state / "heldout.json").write_text(json.dumps(score) + "\n", encoding="utf-8")
    log.info("held out: %.1f%% of %d right", 100 * share, len(held.documents))


if __name__ == "__main__":
    run(main)
