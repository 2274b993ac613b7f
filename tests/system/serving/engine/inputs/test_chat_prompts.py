"""Conversations to prompts: templates, images in order, and what is refused."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cases.tiny_checkpoint import write_tokenizer
from support.cases.tiny_vision import HOLDER, IMAGE, TEMPLATE, TOKENS

from serving.engine.async_engine import AsyncEngine
from serving.engine.engine import Engine
from serving.engine.inputs.chat_prompts import (
    ASYNC_OPTIONS,
    GENERATE_OPTIONS,
    chat_prompts,
    taken_options,
)
from serving.text.tokenizer import Tokenizer

FRONT: Any = SimpleNamespace(placeholder=IMAGE)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("chat")
    write_tokenizer(folder, TOKENS, TEMPLATE)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def own(tokenizer: Tokenizer):
    return lambda adapter: tokenizer


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def image(what: Any) -> dict[str, Any]:
    return {"type": "image", "image": what}


def test_parts_become_a_prompt_with_its_images_in_order(tokenizer: Tokenizer, own):
    (prompt,) = chat_prompts(own, FRONT, [user(image(1), text("a"), image(2))])
    assert prompt["multi_modal_data"] == {"image": [1, 2]}
    want = tokenizer.encode(f"user: {HOLDER}a{HOLDER}", add_special_tokens=False)
    assert prompt["prompt_token_ids"] == want


def test_several_conversations_and_plain_texts(tokenizer: Tokenizer, own):
    one = [{"role": "user", "content": "hi"}]
    prompts = chat_prompts(own, None, [one, [*one, user(text("again"))]])
    assert [tokenizer.decode(p["prompt_token_ids"]) for p in prompts] == [
        "user: hi",
        "user: hiuser: again",
    ]
    assert prompts[0]["multi_modal_data"] == {"image": []}


@pytest.mark.parametrize(
    ("message", "front", "words"),
    [
        (user(image("a.png")), None, "takes text only"),
        (user(text(f"x {IMAGE}")), FRONT, "stands for an image"),
        ({"role": "user", "content": IMAGE}, FRONT, "stands for an image"),
        (user({"type": "video"}), FRONT, "got type 'video'"),
        (user("text"), FRONT, "got type 'None'"),
        (user({"type": "image"}), FRONT, "got type 'image'"),
    ],
)
def test_what_is_refused(own, message, front, words: str):
    with pytest.raises(ValueError, match=words):
        chat_prompts(own, front, [message])


def test_nothing_and_other_things_are_no_conversation(own):
    with pytest.raises(ValueError, match="must not be empty"):
        chat_prompts(own, FRONT, [])
    with pytest.raises(TypeError, match=r"A conversation must be a list of messages, got str"):
        chat_prompts(own, FRONT, ["hello"])
    with pytest.raises(TypeError, match=r"messages.1 must be a dict, got str"):
        chat_prompts(own, FRONT, [{"role": "user", "content": "a"}, "hello"])
    for wrong in (None, "hello", {"role": "user"}):
        with pytest.raises(TypeError, match="messages must be a list of messages"):
            chat_prompts(own, FRONT, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"messages.0.content must be a text or a list of parts"):
        chat_prompts(own, FRONT, [{"role": "user", "content": 5}])


def test_options_of_a_chat_are_told_apart_and_others_refused():
    tools = [{"type": "function", "function": {"name": "f"}}]
    options = {"tools": tools, "images": [], "add_generation_prompt": False}
    taken = taken_options(options)
    assert (taken, options) == ({"tools": tools, "add_generation_prompt": False}, {"images": []})
    with pytest.raises(
        TypeError, match=r"Engine.chat has no option 'chat_template'; there are add"
    ):
        taken_options({"chat_template": "x"})


@pytest.mark.parametrize(
    ("engine", "passed_on"), [(Engine, GENERATE_OPTIONS), (AsyncEngine, ASYNC_OPTIONS)]
)
def test_a_chat_passes_on_every_option_of_generate(engine, passed_on):
    parameters = inspect.signature(engine.generate).parameters.values()
    assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == list(passed_on)


def test_the_template_gets_the_tools():
    seen = {}

    class Template:
        def apply_chat_template(self, messages, add_generation_prompt, **options):
            seen.update(options["variables"])
            return ""

        def encode(self, text, add_special_tokens):
            return [1]

    given = {"tools": ({"name": "f"},), "chat_template_kwargs": {"x": 1}}
    chat_prompts(lambda _: Template(), None, [{"role": "user", "content": "a"}], **given)
    assert seen == {"tools": [{"name": "f"}], "x": 1}
