"""Recipes of the shipped adapters: what the command trains, and examples of each."""

import dataclasses
import json

import numpy as np
import pytest
from PIL import Image

from lora_jax.adapters.task_head import HeadKind
from lora_jax.finetune.pictures import adapter, make_adapters, tasks
from lora_jax.finetune.pictures.make_adapters import RECIPES


def test_only_the_named_recipes_are_trained(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(
        adapter, "main", lambda flags: ran.append(adapter.parser().parse_args(flags))
    )
    monkeypatch.setattr(make_adapters, "write_examples", lambda *given: None)
    monkeypatch.setattr(tasks, "read_sources", lambda folder: {})
    flags = ["--model", str(tmp_path), "--data", "DATA", "--steps", "7", "--only", "count", "where"]
    make_adapters.main(flags)
    where, count = ran
    assert (where.task, where.head, where.tower, where.steps) == ("where", None, False, 7)
    assert (count.task, count.head, count.tower) == ("count", HeadKind.COUNT, True)
    assert [one.out for one in ran] == [tmp_path / "adapters/where", tmp_path / "heads/count"]


def test_there_are_adapters_and_kinds_of_head():
    assert len({recipe.name for recipe in RECIPES}) == len(RECIPES)
    assert sum(recipe.head is None for recipe in RECIPES) >= 4
    assert len({recipe.head for recipe in RECIPES if recipe.head}) >= 3


def test_examples_are_what_the_tasks_drew(picture_parts, tmp_path, monkeypatch):
    recipes = [dataclasses.replace(r, example=3) for r in RECIPES if r.task in ("count", "motion")]
    monkeypatch.setattr(make_adapters, "RECIPES", recipes)
    monkeypatch.setattr(make_adapters, "FUSED_TASKS", ("any",))
    make_adapters.write_examples(tmp_path, picture_parts[True])
    told = json.loads((tmp_path / "examples.json").read_text())
    assert set(told["images"]) == {"", "fused", "count-head", "motion-head"}
    assert set(told["images"]) == {"", *told["adapters"]}
    (drawn,) = tasks.draw("motion", picture_parts[True], 1, 3)
    assert told["adapters"]["motion-head"] == drawn.prompt
    for name, want in zip(told["images"]["motion-head"], drawn.images, strict=True):
        np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / name)), want)


def test_a_recipe_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit):
        make_adapters.main(["--model", "M", "--data", "D", "--only", "gone"])
    assert "'gone'" in capsys.readouterr().err
