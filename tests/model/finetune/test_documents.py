"""Records become the tokens a server would see, with the prompt's share of them."""

import json
import pathlib
import re

import pytest

from lora_jax.finetune import documents
from lora_jax.finetune.assets import tokenizer
from lora_jax.finetune.records import Record

STORIES = pathlib.Path(__file__).parents[3] / "assets" / "stories260k"
RECORD = Record("the cat", "sat on the mat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("model")
    tokenizer.save(tokenizer.train_bpe(["the cat sat on the mat"] * 9, 270), out, 64)
    return out


def test_a_chat_document_is_the_template_of_both_turns(folder):
    read = documents.read_format(folder)
    document = read.chat(RECORD)
    text = read.tokenizer.decode(list(document.tokens), skip_special_tokens=False)
    asked = "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert text == asked + "sat on the mat<|im_end|>\n"
    assert list(document.tokens[: document.num_prompt]) == read.tokenizer.encode(asked).ids


def test_a_plain_document_ends_with_end_of_text(folder):
    read = documents.read_format(folder)
    document = read.plain(RECORD)
    text = read.tokenizer.decode(list(document.tokens), skip_special_tokens=False)
    assert text == "the cat sat on the mat<|endoftext|>"
    answer = read.tokenizer.decode(list(document.tokens[document.num_prompt :]))
    assert answer == " sat on the mat"


def test_a_document_is_cut_behind_the_token_that_completes_a_pattern(folder):
    read = documents.read_format(folder)
    document = read.chat(RECORD)
    cut = read.until(document, re.compile("^sat on"))
    assert cut.tokens == document.tokens[: len(cut.tokens)]
    assert cut.num_prompt == document.num_prompt < len(cut.tokens)
    ends = [
        read.tokenizer.decode(list(document.tokens[document.num_prompt : len(cut.tokens) - less]))
        for less in (0, 1)
    ]
    assert ["sat on" in end for end in ends] == [True, False]
    with pytest.raises(ValueError, match=r"no \^the in 'sat on the mat"):
        read.until(document, re.compile("^the"))


def test_plain_text_of_a_model_with_bos_starts_with_it():
    read = documents.read_format(STORIES)
    document = read.plain(RECORD)
    assert (document.tokens[0], document.tokens[-1]) == (1, 2)
    assert read.tokenizer.decode(list(document.tokens)) == "the cat sat on the mat"


def test_a_model_without_a_chat_template_says_so():
    with pytest.raises(ValueError, match="no chat template"):
        documents.read_format(STORIES).documents([RECORD], "chat")


def test_an_unknown_style_is_named(folder):
    with pytest.raises(ValueError, match="poem"):
        documents.read_format(folder).documents([RECORD], "poem")


def test_a_template_that_rewrites_old_turns_is_refused(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = "{{ messages | length }}{{ messages[-1]['content'] }}"
    config["bos_token"] = {"content": "<|endoftext|>"}
    path.write_text(json.dumps(config))
    read = documents.read_format(tmp_path)
    assert read.bos == "<|endoftext|>"
    with pytest.raises(ValueError, match="answered chat"):
        read.chat(RECORD)
