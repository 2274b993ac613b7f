"""Packs several data sets into as few adapters as their required accuracies allow (V-LoRA 4.2).

    python -m lora_jax.finetune.fusion --model assets/tiny-vl --data DATA \
        --datasets digits kind flags count where motion --require 0.8 0.5 0.3 0.5 0.3 0.6 --out DIR

Data sets are tasks of `pictures.tasks`; adapters answer in words. The open adapter is trained on
the next set; where one of its sets falls below what it requires, the weights of before come back,
bit for bit, the adapter is closed, and a new one starts with this set. With --rehearsal an adapter
goes on learning a share of its earlier sets beside the new one; at 0 a small base forgets them at
once. Requirements are checked on one half of the held-out pictures; the other half takes no part in
any choice, and scores the adapters at the end. OUT/fusion.json tells all. OUT/trainings keeps each
training that ended, so that the same command goes on where a run was cut.
"""

import argparse
import dataclasses
import functools
import hashlib
import io
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from lora_jax.finetune.command import model_folder, run
from lora_jax.finetune.head import HeadParams
from lora_jax.finetune.lora import DTYPES
from lora_jax.finetune.lora_params import LoraPair, LoraSpec
from lora_jax.finetune.peft_export import save_adapter
from lora_jax.finetune.pictures import adapter as picture_adapter
from lora_jax.finetune.pictures import tasks
from lora_jax.finetune.pictures.rows import first_rows, joined
from lora_jax.finetune.training import Schedule
from lora_jax.own_files import write_whole

TRAIN_EXAMPLES, HELDOUT = 1500, 200


@dataclasses.dataclass(frozen=True)
class Fused[Weights]:
    """One adapter: its sets in order, its weights, and each set's accuracy.

    `scores` are those that requirements were checked by, `heldout` those of pictures that had no
    part in any choice.
    """

    sets: tuple[str, ...]
    weights: Weights
    scores: Mapping[str, float]
    heldout: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Fusion[Weights]:
    """All adapters, which sets were taken back out of one, and which miss even alone."""

    adapters: tuple[Fused[Weights], ...]
    rollbacks: tuple[str, ...]
    missed: tuple[str, ...]


def shuffled(datasets: Sequence[str], seed: int) -> tuple[str, ...]:
    """Return the sets in an order that the seed gives."""
    order = np.random.default_rng(seed).permutation(len(datasets))
    return tuple(datasets[int(n)] for n in order)


def fuse[Weights](
    order: Sequence[str],
    required: Mapping[str, float],
    train: Callable[[Weights | None, tuple[str, ...]], Weights],
    score: Callable[[Weights, str], float],
) -> Fusion[Weights]:
    """Return the packing of sets, in order, into adapters.

    `train` gets weights, None for a new adapter, and the adapter's sets with the new one last. It
    leaves what it is given as it is; so a rollback is to keep what was there. A set that misses its
    requirement in an adapter of its own stays there alone and is reported.
    """
    done: list[Fused[Weights]] = []
    rollbacks: list[str] = []
    missed: list[str] = []
    opened: Fused[Weights] | None = None
    for name in order:
        if opened is not None:
            tried = _trained(opened, name, train, score)
            if _meets(tried, required):
                opened = tried
                continue
            rollbacks.append(name)
            done.append(opened)
        opened = _trained(None, name, train, score)
        if not _meets(opened, required):
            missed.append(name)
            done.append(opened)
            opened = None
    if opened is not None:
        done.append(opened)
    return Fusion(tuple(done), tuple(rollbacks), tuple(missed))


def _trained[Weights](
    before: Fused[Weights] | None,
    name: str,
    train: Callable[[Weights | None, tuple[str, ...]], Weights],
    score: Callable[[Weights, str], float],
) -> Fused[Weights]:
    sets = (*(() if before is None else before.sets), name)
    weights = train(None if before is None else before.weights, sets)
    return Fused(sets, weights, {each: score(weights, each) for each in sets})


def _meets(fused: Fused, required: Mapping[str, float]) -> bool:
    return all(score >= required[name] for name, score in fused.scores.items())


def fuse_pictures(
    base: picture_adapter.Base,
    parts: Mapping[bool, tasks.Sources],
    order: Sequence[str],
    required: Mapping[str, float],
    spec: LoraSpec,
    schedule: Schedule,
    counts: tuple[int, int] = (TRAIN_EXAMPLES, HELDOUT),
    rehearsal: float = 0.0,
    folder: pathlib.Path | None = None,
) -> Fusion[HeadParams]:
    """Return the fusion of tasks on images.

    `counts` are examples to learn and of each half that is held out, `rehearsal` the share of each
    earlier set of an adapter that is learned again beside the new one. Trainings that ended are
    kept in `folder`, and are not done again by the next call with the same arguments.
    """
    halves = tasks.halves(parts[True])
    held = [{name: tasks.draw(name, half, counts[1], 7) for name in order} for half in halves]
    rows_of = [
        {name: base.rows(found, None, tower=False) for name, found in half.items()} for half in held
    ]
    learned = {
        name: base.rows(tasks.draw(name, parts[False], counts[0], 100), None, tower=False)
        for name in order
    }

    def train(start: HeadParams | None, sets: tuple[str, ...]) -> HeadParams:
        most = round(rehearsal * counts[0])
        earlier = [first_rows(learned[name], most) for name in sets[:-1] if most]
        rows = joined([learned[sets[-1]], *earlier])
        train_now = functools.partial(
            picture_adapter.train, base, rows, spec, None, schedule, start
        )
        if folder is None:
            return train_now()
        return taken_up(folder / f"{'-'.join(sets)}.npz", base.model.config.hidden_size, train_now)

    def score(params: HeadParams, name: str, half: int = 0) -> float:
        given = held[half][name], rows_of[half][name]
        results = picture_adapter.score(base, params, spec, None, *given)
        print(f"{name}: {results:.3f} on half {half}, {required[name]} required", flush=True)
        return results

    fusion = fuse(order, required, train, score)
    lines = [
        dataclasses.replace(f, heldout={name: score(f.weights, name, 1) for name in f.sets})
        for f in fusion.adapters
    ]
    return dataclasses.replace(fusion, adapters=tuple(lines))


def taken_up(file: pathlib.Path, hidden: int, train: Callable[[], HeadParams]) -> HeadParams:
    """Return the LoRA that `train` gave when the file was written; else call it and write it."""
    if file.exists():
        with np.load(file) as arrays:
            names = sorted({key.rpartition(".")[0] for key in arrays})
            sides = {n: [jnp.asarray(arrays[f"{n}.{side}"]) for side in "ab"] for n in names}
        lora = {name: LoraPair(*pair) for name, pair in sides.items()}
        return picture_adapter.new_head(None, hidden, lora, 0)
    params = train()
    flat = {f"{n}.{side}": getattr(pair, side) for n, pair in params.lora.items() for side in "ab"}
    np.savez(whole := io.BytesIO(), **flat)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, whole.getvalue())
    return params


def kept_trainings(args: argparse.Namespace, counts: tuple[int, int]) -> pathlib.Path:
    """Return the folder of trainings of these arguments, on these files of --model and --data.

    Raises:
        ValueError: trainings of other arguments, files or `counts` of examples began there.
    """
    folder = args.out / "trainings"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "arguments.json"
    given = {k: str(v) for k, v in vars(args).items() if k not in ("out", "require")}
    digests = {f"{name} files": _digest(getattr(args, name)) for name in ("model", "data")}
    text = json.dumps(given | digests | {"counts": counts}, indent=1) + "\n"
    if not file.exists():
        write_whole(file, text.encode())
    elif file.read_text(encoding="utf-8") != text:
        raise ValueError(
            f"{folder} has trainings with other arguments, or of other files; choose another --out."
        )
    return folder


def _digest(folder: pathlib.Path) -> str:
    """Return a digest of the names and contents of a folder's files."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            found.update(f"{path.name}\0".encode() + hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.finetune.fusion")
    add = parser.add_argument
    add("--model", type=model_folder, required=True)
    add("--data", type=pathlib.Path, required=True, help="folder that pictures.collect wrote")
    add("--datasets", nargs="+", choices=list(tasks.TASKS), required=True)
    add(
        "--require",
        nargs="+",
        type=float,
        required=True,
        help="required accuracy of each dataset, 0 to 1",
    )
    add("--out", type=pathlib.Path, required=True, help="folder of adapters and fusion.json")
    add("--rank", type=int, default=8)
    add("--steps", type=int, default=100, help="training steps on each dataset")
    add("--batch-rows", type=int, default=32)
    add("--learning-rate", type=float, default=2e-3)
    add(
        "--rehearsal",
        type=float,
        default=0.0,
        help="fraction of records from earlier datasets, 0 to 1",
    )
    add("--seed", type=int, default=0, help="seed of order and initial weights")
    args = parser.parse_args(argv)
    if len(args.require) != len(args.datasets) or len(set(args.datasets)) != len(args.datasets):
        parser.error("--require needs one accuracy for each of --datasets, which differ")
    for name, accuracy in zip(args.datasets, args.require, strict=True):
        if not 0 <= accuracy <= 1:
            parser.error(f"--require {accuracy} of {name} is no accuracy, 0 to 1")
    if not 0 <= args.rehearsal <= 1:
        parser.error(f"--rehearsal {args.rehearsal} is not a share, 0 to 1")
    parts = tasks.parts(tasks.read_sources(args.data))
    for name in args.datasets:
        tasks.check_sources(name, parts[True])
    required = dict(zip(args.datasets, args.require, strict=True))
    order = shuffled(args.datasets, args.seed)
    spec = LoraSpec(args.rank, 2.0 * args.rank, picture_adapter.TEXT_MODULES)
    warmup = min(20, args.steps // 10)
    schedule = Schedule(args.steps, args.batch_rows, args.learning_rate, warmup, seed=args.seed)
    counts = TRAIN_EXAMPLES, HELDOUT
    base = picture_adapter.Base.read(args.model)
    kept = kept_trainings(args, counts)
    given = base, parts, order, required, spec, schedule, counts
    fusion = fuse_pictures(*given, rehearsal=args.rehearsal, folder=kept)
    catalogue = base.model.catalogue(base.model.config)
    for fused in fusion.adapters:
        folder = args.out / "-".join(fused.sets)
        named = {"base_name": base.name, "dtype": DTYPES["bfloat16"]}
        save_adapter(folder, fused.weights.lora, spec, catalogue, **named)
    summary = {
        "order": order,
        "required": required,
        "adapters": [
            {"sets": f.sets, "scores": dict(f.scores), "heldout": dict(f.heldout)}
            for f in fusion.adapters
        ],
        "rollbacks": fusion.rollbacks,
        "missed": fusion.missed,
    }
    (args.out / "fusion.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary))


if __name__ == "__main__":
    run(main)
