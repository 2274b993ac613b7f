"""English sentences fall into scripture and prose, and what is held out stays so."""

import pathlib

import pytest

from lora_jax.finetune import make_story_adapters as stories
from lora_jax.finetune.records import Record

SOURCE = pathlib.Path(__file__).parents[3] / "shared" / "data" / "esft" / "eval"

RECORDS = (
    Record("ᎠᏴ", "And he saith unto them, Come."),
    Record("ᎠᏓ", "The goose had been listening."),
    Record("ᎤᏒ", "Yes."),
)


def test_old_words_make_scripture():
    assert stories.sentences(RECORDS, True) == (Record("And", "he saith unto them, Come."),)
    assert stories.sentences(RECORDS, False) == (Record("The", "goose had been listening."),)


@pytest.mark.skipif(not SOURCE.exists(), reason="the ESFT files are not here")
def test_heldout_sentences_are_not_trained_on():
    parts = stories.english_sentences(SOURCE)
    assert set(parts) == set(stories.SPECS)
    for part in parts.values():
        long = [r for r in part.heldout if len(r.answer) > 40]
        assert len(long) > 20
        assert not set(long) & set(part.train)
