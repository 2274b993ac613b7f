"""Prompts of every form become token ids."""

import asyncio

import pytest
from support.doubles.fake_engine import BOS, FakeEngine, FakeTokenizer

from serving.http.errors import ApiError
from serving.http.requests import prompts
from serving.http.requests.prompts import Prompt, chat_prompt, check_ids, read_prompts
from serving.http.requests.protocol import ChatMessage
from serving.http.requests.template_options import TemplateOptions
from serving.http.requests.truncation import LEFT, RIGHT, Truncation


def read(given, special: bool = True, context: int = 64) -> list[Prompt]:
    return asyncio.run(read_prompts(FakeEngine(max_model_len=context), given, special))


def test_texts_keep_their_text_and_ids_have_none():
    assert read("a") == [Prompt([BOS, 97], "a")]
    assert read(["a", "b"], special=False) == [Prompt([97], "a"), Prompt([98], "b")]
    assert read([1, 2]) == [Prompt([1, 2], None)]
    assert read([[1], [2]]) == [Prompt([1], None), Prompt([2], None)]


def test_a_truncated_prompt_keeps_its_end_and_its_begin_token():
    engine = FakeEngine(max_model_len=8)
    cut = lambda given, most, side=LEFT: asyncio.run(  # noqa: E731
        read_prompts(engine, given, True, truncation=Truncation(most, side))
    )
    assert cut(["ab", "abcdefghijkl"], 3) == [
        Prompt([BOS, 97, 98], "ab"),
        Prompt([BOS, 107, 108], None),
    ]
    assert cut("abcdefghijkl", 3, RIGHT) == [Prompt([BOS, 97, 98], None)]
    assert cut(list(range(1, 13)), 3) == [Prompt([10, 11, 12], None)]
    options = TemplateOptions(True, False, {})
    message = [ChatMessage(role="user", content="hello")]
    prompt = asyncio.run(chat_prompt(engine, message, options, False, truncation=Truncation(4)))
    assert (prompt.text, len(prompt.ids)) == ("ant]", 4)
    with pytest.raises(ApiError, match=r"\(32769\) exceeds the 32768 tokens that one input may"):
        cut([1] * 32_769, 3)


def test_long_texts_are_the_same_in_a_thread():
    text = "ab" * 2000
    assert read(text, context=8000)[0].ids == [BOS, *text.encode()]


def test_texts_of_a_batch_keep_their_order_however_they_are_grouped():
    texts = ["a" * length for length in (1, 40_000, 2, 3, 30_000, 30_000, 0, 5)]
    found = read(texts, context=50_000)
    assert [p.text for p in found] == texts
    assert [len(p.ids) for p in found] == [1 + len(text) for text in texts]


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(monkeypatch):
    monkeypatch.setattr(FakeTokenizer, "encode", None)
    with pytest.raises(ApiError, match=r"Input length \(at least 65\) exceeds .* \(64\)"):
        read("a" * 65)


def test_the_beginning_of_a_long_text_says_that_it_is_too_long(monkeypatch):
    """One token may stand for 100 characters, so that the length alone does not tell."""
    encoded = []
    monkeypatch.setattr(FakeTokenizer, "longest_token", 100)
    monkeypatch.setattr(
        FakeTokenizer,
        "encode",
        lambda self, text, **_: encoded.append(len(text)) or [1] * len(text),
    )
    with pytest.raises(ApiError, match=r"Input length \(at least 20000\)"):
        read("a" * 900_000, context=10_000)
    assert encoded == [40_000]


def test_names_and_thoughts_of_messages_reach_the_template():
    seen = []
    engine = FakeEngine()
    engine.tokenizer.apply_chat_template = lambda messages, **_: seen.extend(messages) or "x"
    fields = [
        {"role": "user", "content": "a", "name": "Ann"},
        {"role": "assistant", "content": "b", "reasoning": "c"},
        {"role": "assistant", "content": "b", "reasoning_content": "d", "name": 3},
        {"role": "user", "content": "e", "reasoning": "f"},
    ]
    messages = [ChatMessage.model_validate(m) for m in fields]
    asyncio.run(chat_prompt(engine, messages, TemplateOptions(True, False, {}), False))
    thoughts = ["c", "d"]
    assert seen == [
        fields[0],
        *(
            {"role": "assistant", "content": "b", "reasoning": t, "reasoning_content": t}
            for t in thoughts
        ),
        {"role": "user", "content": "e"},
    ]


@pytest.mark.parametrize("given", [None, [], [[]], [[1], []], [260], [-1], [[0], [10**30]]])
def test_refused(given):
    with pytest.raises(ApiError, match="prompt") as error:
        read(given)
    assert error.value.status == 400


def test_a_batch_with_too_many_tokens_in_all_is_refused(monkeypatch):
    monkeypatch.setattr(prompts, "_MAX_ALL_TOKENS", 8)
    with pytest.raises(ApiError, match="more than 8 tokens in all"):
        read(["abcdef"] * 3, context=8)


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


class Images:
    """Images of an engine: each message may have parts; some prompts have too many."""

    max_images = max_tokens = 1

    def expand(self, ids, images):
        if len(images) > 1:
            raise ValueError("2 images for 1 placeholder")
        return [*ids, 7], [3] * len(images)


def asked(messages, images=(), special=True, engine=None):
    engine = engine or FakeEngine()
    options = TemplateOptions(False, False, {})
    return asyncio.run(chat_prompt(engine, messages, options, special, images=images))


def test_messages_with_images_say_where_each_stands(monkeypatch):
    engine = FakeEngine()
    engine.images = Images()
    monkeypatch.setattr(prompts, "parts_of", lambda images, index, message: [])
    user = [ChatMessage(role="user", content="x")]
    prompt = asked(user, ["picture"], engine=engine)
    assert (prompt.ids[-1], prompt.images) == (7, (("picture", 3),))
    with pytest.raises(ApiError, match="2 images for 1 placeholder"):
        asked(user, ["a", "b"], engine=engine)


def test_no_message_and_none_with_a_token_are_refused(monkeypatch):
    with pytest.raises(ApiError, match="messages must not be empty"):
        asked([])
    with pytest.raises(ApiError, match=r"\(at least 65\) exceeds"):
        asked([ChatMessage(role="user", content="")] * 65)
    monkeypatch.setattr(FakeTokenizer, "apply_chat_template", lambda *given, **more: "")
    with pytest.raises(ApiError, match="messages must not be empty"):
        asked([ChatMessage(role="user", content="x")], special=False)


def test_the_text_of_a_message_leaves_images_out():
    assert prompts.text_of({"content": "plain"}) == "plain"
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert prompts.text_of({"content": parts}) == "a\nb"


@pytest.mark.parametrize("field", ["audio", "function_call"])
def test_fields_that_no_model_here_takes_are_refused_by_name(field):
    message = ChatMessage(role="user", content="x", **{field: {"id": "y"}})
    with pytest.raises(ApiError, match=rf"messages.0.{field} is not supported"):
        asked([message])
