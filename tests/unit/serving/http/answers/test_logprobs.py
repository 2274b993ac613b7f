"""Log-probabilities as JSON can carry them."""

import pytest
from support.doubles.fake_engine import FakeTokenizer

from serving.api.request import TokenLogprobs
from serving.http.answers.logprobs import (
    CompletionLogprobs,
    chat_logprobs,
    finite,
    prompt_logprobs,
    token_text,
)

TEXT = token_text(FakeTokenizer(), as_ids=False)
A = TokenLogprobs(97, -2.0, 3, {98: -0.5, 99: -1.0})


def test_infinities_become_a_number():
    assert finite(float("-inf")) == -9999.0
    assert finite(float("nan")) == -9999.0
    assert finite(-1.5) == -1.5


def test_offsets_run_on_and_the_token_is_among_the_top():
    logprobs = CompletionLogprobs(TEXT)
    first = logprobs.render([256, 97], [None, A])
    assert first["text_offset"] == [0, 3]
    assert first["top_logprobs"] == [None, {"b": -0.5, "c": -1.0, "a": -2.0}]
    assert logprobs.render([97], [A])["text_offset"] == [4]


def test_tokens_with_the_same_text_keep_the_likelier():
    same = TokenLogprobs(257, -3.0, 2, {258: -1.0, 257: -3.0})
    assert CompletionLogprobs(TEXT).render([257], [same])["top_logprobs"] == [{"": -1.0}]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="shorter"):
        CompletionLogprobs(TEXT).render([97, 98], [A])


def test_chat_entries():
    entry = chat_logprobs(TEXT, [A])["content"][0]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -2.0, [97])
    assert [e["token"] for e in entry["top_logprobs"]] == ["b", "c"]


def test_prompt_logprobs_by_id_with_ranks():
    first, second = prompt_logprobs(TEXT, [None, A])
    assert first is None
    assert second["97"] == {"logprob": -2.0, "rank": 3, "decoded_token": "a"}
    assert second["98"] == {"logprob": -0.5, "rank": 1, "decoded_token": "b"}


def test_ids_instead_of_text():
    assert token_text(FakeTokenizer(), as_ids=True)(5) == "token_id:5"
