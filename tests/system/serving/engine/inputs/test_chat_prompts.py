"""Conversations to prompts: templates, images in order, and what is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cases.tiny_checkpoint import write_tokenizer
from support.cases.tiny_vision import HOLDER, IMAGE, TEMPLATE, TOKENS

from serving.engine.inputs.chat_prompts import chat_prompts
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
    with pytest.raises(TypeError, match=r"messages.0 must be a dict, got str"):
        chat_prompts(own, FRONT, ["hello"])
