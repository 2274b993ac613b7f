"""Tokenizers of adapters: the base's with their tokens, or a refusal that names the token."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from support.cases.tiny_tokenizers import KINDS

from lora_jax.adapters.added_tokens import AddedToken
from serving.text.adapter_tokenizers import AdapterTokenizers
from serving.text.tokenizer import Tokenizer

ROOM = 4


@pytest.fixture(scope="module", params=KINDS)
def base(request, tmp_path_factory):
    return Tokenizer(KINDS[request.param](tmp_path_factory.mktemp(request.param)))


@dataclasses.dataclass(frozen=True)
class Report:
    added_tokens: tuple = ()


@dataclasses.dataclass(frozen=True)
class Weights:
    report: Report


def tokenizers(base):
    return AdapterTokenizers(base, base.vocab_size + ROOM)


def fitted(base, *tokens) -> Any:
    weights: Any = Weights(Report(tokens))
    return tokenizers(base).fitted(weights)


def entry(*tokens) -> Any:
    return SimpleNamespace(report=Report(tokens))


def test_new_tokens_are_found_in_texts_and_spelled_in_answers(base):
    call = AddedToken("<call>", base.vocab_size)
    word = AddedToken("word", base.vocab_size + 1, special=False)
    made = tokenizers(base)
    own = made.of(entry(call, word))
    ids = own.encode("a<call>word b", add_special_tokens=False)
    assert [i for i in ids if i >= base.vocab_size] == [call.token_id, word.token_id]
    text = own.decode(ids, skip_special_tokens=False)
    assert text.replace(" ", "") == "a<call>wordb"  # some put a space behind an added token
    assert call.token_id in own.special_ids
    assert base.encode("a<call>") != own.encode("a<call>")
    assert own.encode("a plain text") == base.encode("a plain text")
    assert made.of(entry(call, word)) is own
    for plain in (None, {"a": 0.5}, entry(), "unknown"):
        assert made.of(plain) is base


def test_a_name_stands_for_the_version_of_its_user(base):
    made, call = tokenizers(base), AddedToken("<call>", base.vocab_size)

    def named(name, session):
        if name == "nobody":
            raise KeyError(name)
        return entry(call) if session == "new" else entry()

    made.ask(named)
    assert made.of("x", "new").token_id("<call>") == call.token_id
    assert made.of("x") is made.of("nobody", "new") is base


def test_only_what_the_base_lacks_stays(base):
    (known,) = base.token_strs([5])
    call = AddedToken("<call>", base.vocab_size)
    weights = fitted(base, AddedToken(known, 5), call)
    assert weights.report.added_tokens == (call,)
    assert fitted(base, AddedToken(known, 5)).report.added_tokens == ()


def test_what_does_not_fit_is_named(base):
    (known,) = base.token_strs([5])
    size = base.vocab_size
    for token, words in (
        (AddedToken(known, 6), "has the id 6, in the base's it has 5"),
        (AddedToken("<call>", 5), "has the id 5, which is"),
        (AddedToken("<call>", size + ROOM), f"the base has {size + ROOM} rows"),
    ):
        with pytest.raises(ValueError, match=words):
            fitted(base, token)
