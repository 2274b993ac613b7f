"""Held-out accuracy of the shipped adapters and heads, answered by the engine itself."""

from pathlib import Path
from typing import Any

import numpy as np

from bench.vision import shapes
from lora_jax.finetune.pictures import boxes, tasks
from lora_jax.finetune.pictures.box_words import from_words
from lora_jax.finetune.pictures.make_adapters import FUSED_TASKS, RECIPES
from serving import Engine, Sampling

ASKED = Sampling(max_tokens=64, temperature=0.0)


def jobs_of(model: Path) -> list[tuple[Path, str]]:
    """Return the folders of adapters and heads that are there, each with its tasks."""
    found = [(model / recipe.folder, recipe.task) for recipe in RECIPES]
    found += [(model / "adapters" / "fused", task) for task in FUSED_TASKS]
    return [(folder, task) for folder, task in found if folder.is_dir()]


def run(model: Path, data: Path, count: int) -> dict[str, Any]:
    """Return the share of right answers of each adapter on its tasks, and of the base alone."""
    jobs, rows = jobs_of(model), []
    in_words = {recipe.folder for recipe in RECIPES if recipe.head and recipe.words}
    sources = tasks.parts(tasks.read_sources(data))[True]
    adapters = {f"{folder.parent.name}/{folder.name}": folder for folder, _ in jobs}
    sizes: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256}
    sizes |= {"max_model_len": 256, "max_esft_adapters": 0, "structured_outputs": False}
    given = {name.replace("/", "-"): str(folder) for name, folder in adapters.items()}
    with Engine(str(model), given, max_loras=len(given), **sizes) as engine:
        for folder, task in jobs:
            examples = tasks.draw(task, sources, count, 7)
            name = f"{folder.parent.name}-{folder.name}"
            ask = headed if folder.parent.name == "heads" else told
            row = {"adapter": name.replace("-", "/"), "task": task, "heldout": count}
            row |= {"right": ask(engine, name, examples), "base": told(engine, None, examples)}
            if str(folder.relative_to(model)) in in_words:
                row["right_in_words"] = told(engine, name, examples)
            rows.append(row)
            print(row, flush=True)
    return {"rows": rows}


def asked(examples: list[tasks.Example]) -> tuple[list[str], list[list[np.ndarray]]]:
    """Return prompts and images of examples."""
    prompts = [shapes.TURN.format(shapes.IMAGE * len(e.images), e.prompt) for e in examples]
    return prompts, [list(e.images) for e in examples]


def told(engine: Engine, name: str | None, examples: list[tasks.Example]) -> float:
    """Return the share of answers in words that are as wanted; of boxes F1 at half overlap."""
    prompts, images = asked(examples)
    answers = engine.generate(prompts, name, ASKED, images=images)
    texts = [answer.outputs[0].text.strip() for answer in answers]
    if any(example.boxes for example in examples):
        return round(boxes.f1([from_words(text) for text in texts], examples), 3)
    pairs = zip(texts, examples, strict=True)
    return round(float(np.mean([text == example.answer for text, example in pairs])), 3)


def headed(engine: Engine, name: str, examples: list[tasks.Example]) -> float:
    """Return the share of a head's answers with all labels right; of boxes F1 at half overlap."""
    prompts, images = asked(examples)
    answers = [a.outputs for a in engine.classify(prompts, name, images=images)]
    if answers[0].boxes is not None:
        return round(boxes.f1([answer.boxes or () for answer in answers], examples), 3)
    pairs = zip(answers, examples, strict=True)
    return round(float(np.mean([set(a.labels) == set(e.labels) for a, e in pairs])), 3)
