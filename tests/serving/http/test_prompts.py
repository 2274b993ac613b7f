"""Prompts of every form become token ids."""

import asyncio

import pytest
from fake_engine import BOS, FakeEngine

from serving.http.errors import ApiError
from serving.http.prompts import Prompt, chat_prompt, check_ids, read_prompts
from serving.http.protocol import ChatMessage
from serving.http.template_options import TemplateOptions


def read(given, special: bool = True) -> list[Prompt]:
    return asyncio.run(read_prompts(FakeEngine(), given, special))


def test_texts_keep_their_text_and_ids_have_none():
    assert read("a") == [Prompt([BOS, 97], "a")]
    assert read(["a", "b"], special=False) == [Prompt([97], "a"), Prompt([98], "b")]
    assert read([1, 2]) == [Prompt([1, 2], None)]
    assert read([[1], [2]]) == [Prompt([1], None), Prompt([2], None)]


def test_long_texts_are_the_same_in_a_thread():
    text = "ab" * 2000
    assert read(text)[0].ids == [BOS, *text.encode()]


@pytest.mark.parametrize("given", [None, [], [[]], [[1], []], [260], [-1], [[0], [10**30]]])
def test_refused(given):
    with pytest.raises(ApiError, match="prompt") as error:
        read(given)
    assert error.value.status == 400


def test_an_empty_text_is_its_begin_token_or_nothing():
    assert read("") == [Prompt([BOS], "")]
    with pytest.raises(ApiError, match="must not be empty"):
        read("", special=False)


def test_ids_at_the_edges():
    check_ids(FakeEngine(), [0, 259], "tokens")
    check_ids(FakeEngine(), [], "tokens")
    with pytest.raises(ApiError, match=r"tokens has a token id outside of \[0, 259\]"):
        check_ids(FakeEngine(), [0, 260], "tokens")


def test_messages():
    messages = [ChatMessage(role="system", content=None), ChatMessage(role="user", content="x")]
    options = TemplateOptions(False, False, {})
    prompt = asyncio.run(chat_prompt(FakeEngine(), messages, options, True))
    assert prompt.text == "[system][user]x"
    assert prompt.ids[0] == BOS
