"""The shipped model's config is one that is served, and its base learns."""

import copy
import dataclasses
import json
from types import SimpleNamespace

import jax
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from support.cases import tiny_pictures
from support.cases.finetune_cases import trace_training

from lora_jax.config import from_hf
from lora_jax.finetune.pictures import make_base, tasks
from lora_jax.finetune.pictures.rows import picture_rows
from lora_jax.models import load


def test_the_config_is_served():
    config = from_hf(make_base.CONFIG)
    assert config.tower.image_token_id == make_base.VOCAB - 1
    assert config.rope.sections == (12, 10, 10)


def test_an_answer_with_one_wrong_token_is_wrong(monkeypatch):
    """In batches of 4, of which the last one is filled up with the first rows."""
    targets = np.arange(30).reshape(5, 6) % 7
    weights = np.tile([0, 0, 1, 1, 1, 0], (5, 1))
    said = targets.copy()
    said[1, 3] = said[4, 2] = 8  # in the answer
    said[2, 0] = said[3, 5] = 8  # outside

    def take(at):
        return {"targets": targets[at], "weights": weights[at], "said": said[at]}

    def logits(model, batch, values, grid, lora):
        assert (grid, lora) == ("grid", None)
        return jax.nn.one_hot(batch.said, 9)

    monkeypatch.setattr(make_base, "picture_logits", logits)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # rows are given that are none
    Batch = jax.tree_util.register_dataclass(dataclasses.make_dataclass("Batch", take([0])))
    rows = SimpleNamespace(num_rows=5, grid="grid", take=lambda at: Batch(**take(at)))
    settings = SimpleNamespace(values=(0.5,))
    found = make_base.right_answers(nnx.Dict(), rows, settings, batch=4)
    assert list(found) == [True, False, True, True, False]


@pytest.mark.long
def test_answers_of_a_random_model_are_wrong(picture_base, picture_parts):
    examples = tasks.draw("count", picture_parts[False], 5, 0)
    given = (picture_base.form, picture_base.model.config, picture_base.settings)
    found = make_base.right_answers(
        picture_base.model, picture_rows(examples, *given), picture_base.settings, batch=4
    )
    assert found.shape == (5,)
    assert not found.any(), "a random model spells no answer"


@pytest.fixture
def tiny(monkeypatch):
    """The command's model, narrow and with a small vocabulary; its training is traced only."""
    raw = copy.deepcopy(make_base.CONFIG)
    raw["text_config"] |= tiny_pictures.TEXT | {"vocab_size": 280, "eos_token_id": [2, 0]}
    raw["text_config"]["rope_scaling"]["mrope_interleaved"] = True
    raw["vision_config"] |= tiny_pictures.TOWER | {"patch_size": 8}
    places = ("vision_start_token_id", "vision_end_token_id", "image_token_id")
    raw |= dict(zip(places, (277, 278, 279), strict=True))
    monkeypatch.setattr(make_base, "CONFIG", raw)
    monkeypatch.setattr(make_base, "VOCAB", 280)
    monkeypatch.setattr(make_base, "LENGTH", 160)  # few tokens are whole words
    draw = tasks.draw
    few = lambda task, sources, count, seed: draw(task, sources, min(count, 16), seed)  # noqa: E731
    monkeypatch.setattr(tasks, "draw", few)  # it asks for hundreds
    return trace_training(monkeypatch, make_base)


def test_the_command_trains_on_four_tasks_and_measures_what_is_held_out(
    tiny, picture_data, tmp_path, monkeypatch, capsys
):
    measured, out = [], tmp_path / "out"

    def right_answers(model, rows, settings):
        measured.append(rows)
        return np.arange(rows.num_rows) % 4 == 0

    monkeypatch.setattr(make_base, "right_answers", right_answers)
    flags = ["--data", str(picture_data), "--out", str(out), "--examples", "3"]
    make_base.main([*flags, "--steps", "40", "--batch-rows", "2"])
    (fit,) = tiny
    assert fit.text.num_rows == 3 * len(tasks.BASE_TASKS)
    assert (fit.schedule.steps, fit.schedule.warmup_steps, fit.schedule.batch_rows) == (40, 4, 2)
    _, config = load(out, dtype="float32")
    assert config.tower.image_token_id == 279
    assert json.loads((out / "preprocessor_config.json").read_text()) == make_base.PROCESSOR
    assert [rows.num_rows for rows in measured] == [16] * 4
    told = capsys.readouterr().out.splitlines()[-4:]
    assert told == [f"{t}: 25.0 % of 16 held-out images right" for t in tasks.BASE_TASKS]


def test_rows_of_several_processes_are_those_of_each_seed(
    tiny, picture_data, tmp_path, monkeypatch
):
    class Pool:
        """Processes that are none."""

        def __init__(self, count):
            self.count = count

        def __enter__(self):
            return self

        def __exit__(self, *error):
            """Nothing runs."""

        def map(self, function, work):
            assert len(work) == self.count
            return [function(one) for one in work]

    context = SimpleNamespace(Pool=Pool)
    monkeypatch.setattr(make_base.multiprocessing, "get_context", lambda kind: context)
    sources = tasks.parts(tasks.read_sources(picture_data))[False]
    make_base.write_text_files(sources, tmp_path / "out")
    rows = make_base.base_rows(sources, tmp_path / "out", 3, 2)  # two of each task by each
    first, second = (make_base.drawn((sources, tmp_path / "out", 2, seed)) for seed in range(2))
    half = 2 * len(tasks.BASE_TASKS)
    np.testing.assert_array_equal(rows.tokens[:half], first.tokens)
    np.testing.assert_array_equal(rows.pixels[half:], second.pixels)
    assert not np.array_equal(first.pixels, second.pixels)
