"""Keys of prompts: the caller's, or new ones, and the tokenizer asks for the same."""

from typing import Any

import pytest

from serving.engine.inputs.sessions import KeyedTokenizers, keys_of


def test_a_text_is_the_key_of_all_prompts_and_none_is_a_new_one_for_each():
    assert keys_of("anna", 3) == ["anna"] * 3
    assert keys_of(["anna", "bert"], 2) == ["anna", "bert"]
    for session in (None, "", ["", ""]):
        first, second = keys_of(session, 2)
        assert first
        assert first != second


def test_wrong_sessions_say_what_to_give():
    with pytest.raises(ValueError, match="2 sessions for 3 prompts; give one, or one for each"):
        keys_of(["anna", "bert"], 3)
    wrong: Any
    for wrong in (7, [None], b"anna"):
        with pytest.raises(TypeError, match="session must be a text, or one for each prompt"):
            keys_of(wrong, 1)
        with pytest.raises(TypeError, match="session must be a text, or one for each prompt"):
            KeyedTokenizers(lambda name, key: None, wrong)


@pytest.mark.parametrize("session", [None, "anna", ["anna", "bert"]])
def test_the_tokenizer_of_a_prompt_is_asked_for_with_its_key(session):
    asked: list[tuple[Any, str]] = []
    tokenizers: Any = KeyedTokenizers(lambda name, key: asked.append((name, key)), session)
    tokenizers("sql")
    tokenizers(None)
    assert asked == list(zip(["sql", None], tokenizers.keys, strict=True))
    assert session is None or tokenizers.keys == keys_of(session, 2)


def test_too_few_sessions_are_left_to_the_call_that_knows_all_prompts():
    tokenizers: Any = KeyedTokenizers(lambda name, key: None, ["anna"])
    tokenizers("sql")
    tokenizers("sql")
    assert tokenizers.keys == ["anna", ""]
