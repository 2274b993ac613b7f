"""Rows of training are the tokens, places and images that a server makes of the same request."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.finetune.pictures import tasks
from lora_jax.finetune.pictures.rows import (
    first_rows,
    image_rows_of,
    joined,
    picture_rows,
    with_cells,
)
from lora_jax.vision.rope_positions import rope_positions


@pytest.mark.parametrize("task", ["count", "motion"])
def test_images_stand_at_their_placeholders(picture_base, picture_parts, task):
    examples = tasks.draw(task, picture_parts[False], 3, 0)
    config = picture_base.model.config
    rows = picture_rows(examples, picture_base.form, config, picture_base.settings)
    count = len(examples[0].images)
    for row, example in enumerate(examples):
        at = rows.token_to_cell[row] >= 0
        np.testing.assert_array_equal(at, rows.tokens[row] == config.tower.image_token_id)
        np.testing.assert_array_equal(rows.token_to_cell[row][at], np.arange(4 * count))
        first = np.flatnonzero(at)[::4]
        placed = [(int(start), rows.grid) for start in first]
        want = rope_positions(config.tower, True, placed, rows.tokens.shape[1])
        np.testing.assert_array_equal(rows.rope_positions[row], want)
        answer = rows.targets[row][rows.weights[row] > 0]
        text = picture_base.form.tokenizer.decode(answer.tolist(), skip_special_tokens=False)
        assert text.startswith(example.answer)
        assert rows.last[row] == np.flatnonzero(rows.weights[row])[0]


@pytest.mark.long
def test_cells_made_before_are_those_of_the_tower(picture_base, picture_parts):
    examples = tasks.draw("motion", picture_parts[False], 2, 0)
    given = (picture_base.form, picture_base.model.config, picture_base.settings)
    rows = picture_rows(examples, *given)
    made = with_cells(picture_base.model, rows, picture_base.settings, batch=8)
    values = jnp.asarray(picture_base.settings.values)
    both = [
        image_rows_of(picture_base.model, r.take(np.arange(2)), values, rows.grid, None)
        for r in (rows, made)
    ]
    np.testing.assert_allclose(both[0].rows, both[1].rows, atol=1e-6)
    np.testing.assert_array_equal(both[0].token_to_row, both[1].token_to_row)


def test_rows_of_several_processes_are_joined(picture_base, picture_parts):
    given = (picture_base.form, picture_base.model.config, picture_base.settings)
    parts = [
        picture_rows(tasks.draw("any", picture_parts[False], 2, n), *given, length=100)
        for n in range(2)
    ]
    both = joined(parts)
    assert both.num_rows == 4
    for name in ("tokens", "pixels", "last"):
        want = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(getattr(both, name), want)
    with pytest.raises(ValueError, match="20 are allowed"):
        picture_rows(tasks.draw("any", picture_parts[False], 1, 0), *given, length=20)
    assert dataclasses.fields(both)


def test_rows_of_unequal_tasks_are_joined_with_padding(picture_base, picture_parts):
    given = (picture_base.form, picture_base.model.config, picture_base.settings)
    one, many = (
        picture_rows(tasks.draw(task, picture_parts[False], 3, 0), *given)
        for task in ("any", "motion")
    )
    both, short = joined([first_rows(one, 2), many]), one.tokens.shape[1]
    assert both.num_rows == 5
    assert short < both.tokens.shape[1] == many.tokens.shape[1]
    np.testing.assert_array_equal(both.tokens[:2, :short], one.tokens[:2])
    np.testing.assert_array_equal(both.pixels[:2, :1], one.pixels[:2])
    assert (both.token_to_cell[:2, short:] == -1).all()
    assert (both.weights[:2, short:] == 0).all()
    for name in ("tokens", "token_to_cell", "pixels"):
        np.testing.assert_array_equal(getattr(both, name)[2:], getattr(many, name))
