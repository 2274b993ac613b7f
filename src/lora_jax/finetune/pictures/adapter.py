"""Trains an adapter of a model with a tower on one task of `tasks`, with a head or without.

    python -m lora_jax.finetune.pictures.adapter --model assets/tiny-vl --data DATA --task count \
        --head count --out assets/tiny-vl/heads/count

Without --head the adapter answers in words, with --head and --words in both ways: its head and the
base's LM head above the same LoRA. The held-out score is told, and that of the base: its own words,
and the same head alone above its states. --start trains on the adapter of a folder; a head alone is
not trained then.
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters.formats import peft_format
from lora_jax.adapters.formats.head_format import labels_of
from lora_jax.adapters.task_head import SCORE, HeadKind, TaskHead, with_head
from lora_jax.finetune.command import run
from lora_jax.finetune.documents import TextFormat, read_format
from lora_jax.finetune.forward import head as lm_head
from lora_jax.finetune.forward import states
from lora_jax.finetune.head import HeadParams, head_loss, init_head
from lora_jax.finetune.head_export import add_head
from lora_jax.finetune.lora import DTYPES
from lora_jax.finetune.lora_params import (
    LoraDelta,
    LoraSpec,
    init_lora,
    loaded_lora,
    trained_delta,
)
from lora_jax.finetune.peft_export import save_adapter
from lora_jax.finetune.pictures import boxes, tasks
from lora_jax.finetune.pictures.collect import KINDS
from lora_jax.finetune.pictures.make_base import picture_logits, right_answers
from lora_jax.finetune.pictures.rows import (
    PictureBatch,
    PictureRows,
    image_rows_of,
    picture_rows,
    with_cells,
)
from lora_jax.finetune.training import Schedule, fit, mean_loss
from lora_jax.models import load
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Array, Float, Int
from lora_jax.vision.processor import ProcessorSettings, read_settings

QUERIES = 6
TEXT_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOWER_MODULES = ("visual.attn.qkv",)
_BATCH = 50


@dataclasses.dataclass(frozen=True, eq=False)
class Base:
    """A model to train above, as its folder has it, in float32."""

    model: AbstractCausalLM
    form: TextFormat
    settings: ProcessorSettings
    name: str

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Base":
        """Return the model of a folder."""
        model, config = load(folder, dtype="float32")
        settings = read_settings(folder, config.tower)
        return cls(model, read_format(folder), settings, folder.resolve().name)

    def rows(
        self,
        examples: Sequence[tasks.Example],
        head: TaskHead | None,
        *,
        tower: bool,
        words: bool = False,
    ) -> PictureRows:
        """Return examples as rows: for a head what is wanted of it, without `words` no answers.

        Their images are through the tower already unless `tower` is trained.
        """
        wanted = None if head is None else wanted_of(examples, head)
        if head is not None and not words:
            examples = [dataclasses.replace(example, answer="") for example in examples]
        config = self.model.config
        rows = picture_rows(examples, self.form, config, self.settings, wanted=wanted)
        return rows if tower else with_cells(self.model, rows, self.settings)


def head_for(kind: HeadKind, examples: Sequence[tasks.Example]) -> TaskHead:
    """Return a head of a kind with the labels of the examples."""
    labels = {label for example in examples for label in example.labels}
    if kind is HeadKind.COUNT:
        return TaskHead(kind, tuple(str(n) for n in range(max(map(int, labels)) + 1)))
    if kind is HeadKind.BOXES:
        return TaskHead(kind, tuple(KINDS), QUERIES)
    return TaskHead(kind, tuple(sorted(labels)))


def wanted_of(examples: Sequence[tasks.Example], head: TaskHead) -> Any:
    """Return what a head should give: 1.0 for an example's labels, or its boxes."""
    if head.kind is HeadKind.BOXES:
        return boxes.wanted_boxes(examples, head, tasks.MOST_THINGS)
    wanted = np.zeros((len(examples), len(head.labels)), np.float32)
    for row, example in enumerate(examples):
        wanted[row, [head.labels.index(label) for label in example.labels]] = 1.0
    return wanted


def picture_states(
    model: AbstractCausalLM,
    batch: PictureBatch,
    values: Float[Array, "3 256"],
    grid: tuple[int, int],
    lora: LoraDelta | None,
) -> Float[Array, "places hidden"]:
    """Return the state of every place, rows one after the other."""
    images = image_rows_of(model, batch, values, grid, lora)
    flat = jnp.zeros_like(batch.tokens)
    return states(model, batch.tokens, flat, flat, lora, images)[0]


def last_places(batch: PictureBatch) -> Int[Array, "rows"]:
    """Return the places of each row's last prompt token, whose states a head reads."""
    rows, length = batch.tokens.shape
    return jnp.arange(rows, dtype=jnp.int32) * length + batch.last


def head_states(
    model: AbstractCausalLM,
    batch: PictureBatch,
    values: Float[Array, "3 256"],
    grid: tuple[int, int],
    lora: LoraDelta | None,
) -> Float[Array, "rows hidden"]:
    """Return the state of each row's last prompt token, which a head reads."""
    return picture_states(model, batch, values, grid, lora)[last_places(batch)]


def loss_of_head(
    logits: Float[Array, "rows size"], wanted: Any, head: TaskHead
) -> Float[Array, ""]:
    """Return the mean loss of a head's logits; `wanted` is `wanted_of` of the rows."""
    if head.kind is HeadKind.BOXES:
        return boxes.boxes_loss(logits, wanted, head)
    return head_loss(logits, wanted, jnp.ones(logits.shape[:1], jnp.float32), head.kind)


def train(
    base: Base,
    rows: PictureRows,
    spec: LoraSpec | None,
    head: TaskHead | None,
    schedule: Schedule,
    start: HeadParams | None = None,
    *,
    words: bool = False,
) -> HeadParams:
    """Return LoRA, a head or both, trained on rows; a `spec` of None trains a head alone.

    Without a head its weight in the result is empty. `start` is trained on, if it is given. With
    `words` the LM head learns the rows' answers beside the head, whose loss counts as much.
    """
    catalogue = base.model.catalogue(base.model.config)
    graphdef, state = nnx.split(base.model, graph=False)
    values = jnp.asarray(base.settings.values)

    def loss(params: HeadParams, state: Any, batch: PictureBatch) -> Float[Array, ""]:
        model = nnx.merge(graphdef, state)
        delta = trained_delta(params.lora, spec, catalogue) if spec else None
        if head is None:
            logits = picture_logits(model, batch, values, rows.grid, delta)
            return mean_loss(logits, batch.targets, batch.weights)
        x = picture_states(model, batch, values, rows.grid, delta)
        by_head = loss_of_head(params.logits(x[last_places(batch)]), batch.wanted, head)
        if not words:
            return by_head
        logits = lm_head(model, x, delta).reshape(*batch.tokens.shape, -1)
        return by_head + mean_loss(logits, batch.targets, batch.weights)

    if start is None:
        lora = init_lora(spec, catalogue, schedule.seed) if spec else {}
        start = new_head(head, base.model.config.hidden_size, lora, schedule.seed)
    return fit(start, state, loss, rows, schedule, label="adapter")


def new_head(head: TaskHead | None, hidden: int, lora: Any, seed: int) -> HeadParams:
    """Return a head to train: random rows for boxes, whose queries must differ, else zeros."""
    params = init_head(TaskHead(HeadKind.CLASS, ()) if head is None else head, hidden, lora)
    if head is None or not head.queries:
        return params
    weight = jax.random.normal(jax.random.key(seed), params.weight.shape) * hidden**-0.5
    return dataclasses.replace(params, weight=weight)


def started(folder: pathlib.Path, base: Base, spec: LoraSpec, head: TaskHead | None) -> HeadParams:
    """Return the LoRA of an adapter's folder, and its head, to train on.

    A head that the folder lacks is new. Raises ValueError for LoRA that is not of the spec, and for
    a head of another meaning.
    """
    hidden, catalogue = base.model.config.hidden_size, base.model.catalogue(base.model.config)
    labels = labels_of(folder)
    read = peft_format.read(folder, with_head(catalogue, hidden, labels) if labels else catalogue)
    lora, found = loaded_lora(read, spec, catalogue), read.report.head
    if found is None or head is None:
        return new_head(head, hidden, lora, 0)
    if found != head:
        raise ValueError(f"{folder.name} has a head {found}; the examples ask for {head}")
    site = read.sites[SCORE, 0]
    weight, bias = site.a[0], site.b[0, head.size, : head.size]
    return HeadParams(jnp.asarray(weight, jnp.float32), jnp.asarray(bias, jnp.float32), lora)


def score(
    base: Base,
    params: HeadParams | None,
    spec: LoraSpec | None,
    head: TaskHead | None,
    examples: Sequence[tasks.Example],
    rows: PictureRows,
) -> float:
    """Return the share of examples that are answered right; of boxes F1 at an overlap of half."""
    catalogue = base.model.catalogue(base.model.config)
    delta = trained_delta(params.lora, spec, catalogue) if params and spec else None
    if head is None:
        is_right = right_answers(base.model, rows, base.settings, delta, _BATCH)
        return float(is_right.mean())
    assert params is not None
    graphdef, state = nnx.split(base.model, graph=False)
    values = jnp.asarray(base.settings.values)

    @jax.jit
    def logits_of(state: Any, delta: Any, batch: PictureBatch) -> Array:
        model = nnx.merge(graphdef, state)
        return params.logits(head_states(model, batch, values, rows.grid, delta))

    starts = range(0, rows.num_rows, _BATCH)
    places = [np.arange(at, at + _BATCH) % rows.num_rows for at in starts]
    logits = np.concatenate([np.asarray(logits_of(state, delta, rows.take(at))) for at in places])
    answers = [head.answer(row) for row in logits[: rows.num_rows]]
    if head.kind is HeadKind.BOXES:
        return boxes.f1([answer.boxes or () for answer in answers], examples)
    pairs = zip(answers, examples, strict=True)
    return float(np.mean([set(a.labels) == set(e.labels) for a, e in pairs]))


def scores(
    args: argparse.Namespace,
    base: Base,
    params: HeadParams,
    spec: LoraSpec,
    head: TaskHead | None,
    held: Sequence[tasks.Example],
) -> dict[str, Any]:
    """Return the held-out scores of an adapter, of its words if it has both, and of the base.

    Words that tell boxes are not scored here: hardly an answer is right to its last digit.
    `bench.vision --accuracy` has an engine write them.
    """
    rows = base.rows(held, head, tower=args.tower)
    found = {"task": args.task, "heldout": args.heldout}
    found["adapter"] = round(score(base, params, spec, head, held, rows), 4)
    if args.words and args.head is not HeadKind.BOXES:
        told = base.rows(held, None, tower=args.tower)
        found["words"] = round(score(base, params, spec, None, held, told), 4)
    words = rows if head is None else base.rows(held, None, tower=False)
    found["base"] = round(score(base, None, None, None, held, words), 4)
    return found


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    flags = argparse.ArgumentParser(prog="python -m lora_jax.finetune.pictures.adapter")
    add = flags.add_argument
    add("--model", type=pathlib.Path, required=True)
    add("--data", type=pathlib.Path, required=True)
    add("--task", choices=list(tasks.TASKS), required=True)
    add("--head", type=HeadKind, choices=list(HeadKind))
    add("--words", action="store_true", help="with --head: the LM head learns the answers too")
    add("--start", type=pathlib.Path, help="folder of an adapter to train on (default: a new one)")
    add("--tower", action="store_true", help="LoRA on the tower's attention too")
    add("--rank", type=int, default=8)
    add("--examples", type=int, default=3000)
    add("--steps", type=int, default=300)
    add("--batch-rows", type=int, default=32)
    add("--learning-rate", type=float, default=3e-3)
    add("--heldout", type=int, default=500, help="examples to measure on")
    add("--seed", type=int, default=0)
    add("--out", type=pathlib.Path, required=True)
    return flags


def main(argv: list[str]) -> None:
    """Run the command."""
    flags = parser()
    args = flags.parse_args(argv)
    if args.words and args.head is None:
        flags.error("--words goes with --head; without --head the adapter answers in words alone")
    base, parts = Base.read(args.model), tasks.parts(tasks.read_sources(args.data))
    learned = tasks.draw(args.task, parts[False], args.examples, args.seed + 100)
    held = tasks.draw(args.task, parts[True], args.heldout, 7)
    head = None if args.head is None else head_for(args.head, learned)
    modules = TEXT_MODULES + (TOWER_MODULES if args.tower else ())
    spec = LoraSpec(args.rank, 2.0 * args.rank, modules)
    warmup = min(20, args.steps // 10)
    schedule = Schedule(args.steps, args.batch_rows, args.learning_rate, warmup, seed=args.seed)
    start = None if args.start is None else started(args.start, base, spec, head)
    rows = base.rows(learned, head, tower=args.tower, words=args.words)
    params = train(base, rows, spec, head, schedule, start, words=args.words)
    catalogue, dtype = base.model.catalogue(base.model.config), DTYPES["bfloat16"]
    save_adapter(args.out, params.lora, spec, catalogue, base_name=base.name, dtype=dtype)
    if head is not None:
        add_head(args.out, head, np.asarray(params.weight), np.asarray(params.bias), dtype)
    summary = scores(args, base, params, spec, head, held)
    if head is not None and start is None:  # the same training without LoRA
        above = base.rows(learned, head, tower=False)
        alone = train(base, above, None, head, schedule)
        heldout = base.rows(held, head, tower=args.tower)
        summary["head_alone"] = round(score(base, alone, None, head, held, heldout), 4)
    (args.out / "heldout.json").write_text(json.dumps(summary) + "\n", encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    run(main)
