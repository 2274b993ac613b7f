"""Trains the adapters and task heads of assets/tiny-vl, one after the other.

    python -m lora_jax.finetune.pictures.make_adapters --model assets/tiny-vl --data DATA

Each goes into MODEL/adapters or MODEL/heads, with its held-out scores in `heldout.json`. With
--only the command trains those alone, so several processes can share the work. MODEL/examples.json
and MODEL/examples get a held-out example of each for the demo page.
"""

import argparse
import dataclasses
import json
import pathlib

from PIL import Image

from lora_jax.adapters.task_head import HeadKind
from lora_jax.finetune.pictures import adapter, tasks


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An adapter: its folder below the model, its task, and the kind of its head, if it has one."""

    folder: str
    task: str
    head: HeadKind | None = None
    tower: bool = True  # LoRA on the tower's attention too
    words: bool = False  # the LM head learns the task beside the head
    example: int = 11  # seed of the held-out example for the demo page

    @property
    def name(self) -> str:
        """The folder's own name."""
        return pathlib.PurePath(self.folder).name

    @property
    def served_name(self) -> str:
        """The name by which `make serve` offers it."""
        return f"{self.name}-head" if self.head else self.name

    def flags(self, model: pathlib.Path) -> list[str]:
        """Return the flags of `pictures.adapter` for this recipe."""
        flags = ["--model", str(model), "--task", self.task, "--out", str(model / self.folder)]
        flags += ["--head", self.head.value] if self.head else []
        flags += ["--words"] if self.words else []
        return flags + (["--tower"] if self.tower else [])


RECIPES = (
    Recipe("adapters/clothes", "clothes"),
    Recipe("adapters/digits", "digits"),
    Recipe("adapters/flags", "flags"),
    Recipe("adapters/where", "where", tower=False),
    # By its head the shipped adapter finds all four things of this example.
    Recipe("heads/boxes", "boxes", HeadKind.BOXES, tower=False, words=True, example=17),
    Recipe("heads/count", "count", HeadKind.COUNT),
    Recipe("heads/motion", "motion", HeadKind.CLASS, tower=False),
    Recipe("heads/presence", "presence", HeadKind.MULTI_LABEL),
)


FUSED_TASKS = ("presence", "count", "clothes", "digits")  # of adapters/fused, by finetune.fusion


def write_examples(model: pathlib.Path, sources: tasks.Sources) -> None:
    """Write examples.json and its images: of the base a list, of each recipe its own task."""
    prompts, images = {}, {}
    (model / "examples").mkdir(exist_ok=True)
    for name, task, seed in [
        ("", "list", Recipe.example),
        ("fused", FUSED_TASKS[-1], Recipe.example),
        *((r.served_name, r.task, r.example) for r in RECIPES),
    ]:
        (example,) = tasks.draw(task, sources, 1, seed)
        prompts[name], images[name] = example.prompt, []
        for number, pixels in enumerate(example.images):
            images[name].append(f"examples/{task}{number or ''}.png")
            Image.fromarray(pixels).save(model / images[name][-1], optimize=True)
    content = {"prompt": prompts.pop(""), "adapters": prompts, "images": images}
    (model / "examples.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.finetune.pictures.make_adapters")
    add = parser.add_argument
    add("--model", type=pathlib.Path, required=True)
    add("--data", type=pathlib.Path, required=True, help="folder that pictures.collect wrote")
    add(
        "--only",
        nargs="+",
        choices=[recipe.name for recipe in RECIPES],
        help="adapters to train (default: all)",
    )
    add("--steps", type=int, default=1500)
    add("--batch-rows", type=int, default=64)
    add("--examples", type=int, default=12000)
    add("--learning-rate", type=float, default=2e-3)
    add("--heldout", type=int, default=500, help="examples to measure on")
    args = parser.parse_args(argv)
    shared = ["--data", str(args.data)]
    for flag in ("steps", "batch_rows", "examples", "learning_rate", "heldout"):
        shared += [f"--{flag.replace('_', '-')}", str(getattr(args, flag))]
    write_examples(args.model, tasks.parts(tasks.read_sources(args.data))[True])
    for recipe in RECIPES:
        if args.only is None or recipe.name in args.only:
            adapter.main(recipe.flags(args.model) + shared)


if __name__ == "__main__":
    main()
