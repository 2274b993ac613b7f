"""The shipped model's config is one that is served, and its base learns."""

import pytest

from lora_jax.config import from_hf
from lora_jax.finetune.pictures import make_base, tasks
from lora_jax.finetune.pictures.rows import picture_rows


def test_the_config_is_served():
    config = from_hf(make_base.CONFIG)
    assert config.tower.image_token_id == make_base.VOCAB - 1
    assert config.rope.sections == (12, 10, 10)


@pytest.mark.long
def test_answers_are_right_only_if_every_token_is(picture_base, picture_parts):
    examples = tasks.draw("count", picture_parts[False], 5, 0)
    given = (picture_base.form, picture_base.model.config, picture_base.settings)
    found = make_base.right_answers(
        picture_base.model, picture_rows(examples, *given), picture_base.settings, batch=4
    )
    assert found.shape == (5,)
    assert not found.any(), "a random model spells no answer"
