"""Flags that the training commands share."""

import argparse
import pathlib
import sys
from collections.abc import Callable

from lora_jax.finetune.documents import Document, read_format
from lora_jax.finetune.records import read_jsonl
from lora_jax.finetune.training import Schedule


def training_parser(name: str, text: str, learning_rate: float) -> argparse.ArgumentParser:
    """Return a command line with everything but the flags of one kind of adapter."""
    parser = argparse.ArgumentParser(prog=f"python -m lora_jax.finetune.{name}", description=text)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--model", type=model_folder, required=True, help="checkpoint folder of the base model")
    add(
        "--data",
        type=existing_file,
        nargs="+",
        required=True,
        help="records, as .jsonl or .jsonl.gz files",
    )
    add("--out", type=pathlib.Path, required=True, help="folder of the adapter")
    add(
        "--state",
        type=pathlib.Path,
        help="folder of checkpoints and loss.jsonl (default: OUT.training)",
    )
    add("--style", choices=("chat", "plain"), default="chat")
    add("--answer-only", action="store_true", help="train on the tokens of answers only")
    add("--length", type=int, default=512, help="tokens in a row")
    add("--batch-rows", type=int, default=4)
    add("--steps", type=int, default=200)
    add("--learning-rate", type=float, default=learning_rate)
    add("--weight-decay", type=float, default=0.0)
    add("--checkpoint-every", type=int, default=50)
    add("--seed", type=int, default=0)
    return parser


def model_folder(text: str) -> pathlib.Path:
    """Return a checkpoint folder, or raise what argparse turns into its message."""
    path = pathlib.Path(text)
    if not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is no folder"
        raise argparse.ArgumentTypeError(
            f"{text} {what}; give the folder of a model, nothing is downloaded"
        )
    return path


def existing_file(text: str) -> pathlib.Path:
    """Return a file that is there, or raise what argparse turns into its message."""
    path = pathlib.Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def schedule_of(args: argparse.Namespace) -> Schedule:
    """Return how long and how fast the flags say to train; a tenth of it, at most 20, warms up."""
    return Schedule(
        steps=args.steps,
        batch_rows=args.batch_rows,
        learning_rate=args.learning_rate,
        warmup_steps=min(20, args.steps // 10),
        weight_decay=args.weight_decay,
        seed=args.seed,
        checkpoint_every=args.checkpoint_every,
    )


def documents_of(args: argparse.Namespace) -> list[Document]:
    """Return one document per record of --data, in the turns or plain text of the base model."""
    records = [record for path in args.data for record in read_jsonl(path)]
    return read_format(args.model).documents(records, args.style)


def state_of(args: argparse.Namespace) -> pathlib.Path:
    """Return the folder of the checkpoints."""
    return args.state or args.out.with_name(args.out.name + ".training")


def run(main: Callable[[list[str]], None]) -> None:
    """Run a command; an input that it refuses ends it with status 1 and one line."""
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
