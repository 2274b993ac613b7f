"""Sampling parameters and the context limit."""

import pytest

from serving.api.sampling import Sampling
from serving.http.errors import ApiError
from serving.http.requests.parameters import chat_sampling, completion_sampling, fit_context
from serving.http.requests.protocol import ChatBody, CompletionBody


def completion(**values) -> CompletionBody:
    return CompletionBody(**values)


def chat(**values) -> ChatBody:
    return ChatBody(messages=[], **values)


def test_defaults_are_the_engine_s():
    assert completion_sampling(completion(), 64, {}) == Sampling()
    assert chat_sampling(chat(), 40, {}) == Sampling(max_tokens=40)


def test_what_a_body_does_not_set_is_the_server_s_default():
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 30}
    want = Sampling(temperature=0.6, top_k=20, max_tokens=30)
    assert chat_sampling(chat(), 40, defaults) == want
    assert chat_sampling(chat(temperature=0.0, max_tokens=50), 40, defaults) == Sampling(
        temperature=0.0, top_k=20, max_tokens=50
    )
    assert completion_sampling(completion(top_k=0), 64, defaults) == Sampling(temperature=0.6)


def test_a_default_that_is_too_long_is_cut_to_the_context():
    sampling = chat_sampling(chat(), 4, {"max_tokens": 30})
    assert fit_context(sampling, chat(), 60, 64).max_tokens == 4


def test_every_field_arrives():
    values = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 5,
        "n": 3,
        "stop_token_ids": [4],
        "min_tokens": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "max_tokens": 9,
        "allowed_token_ids": [4, 5],
        "bad_words": ["no"],
    }
    body = completion(**values, stop="x", logit_bias={"3": -1.0}, logprobs=2)
    got = completion_sampling(body, 64, {"top_k": 3, "max_tokens": 4})
    for field, value in values.items():
        assert getattr(got, field) == (tuple(value) if isinstance(value, list) else value)
    assert got.stop == ("x",)
    assert got.logit_bias == {3: -1.0}
    assert got.logprobs == 2


def test_max_completion_tokens_wins():
    body = completion(max_tokens=3, max_completion_tokens=5)
    assert completion_sampling(body, 64, {}).max_tokens == 5


def test_echo_with_logprobs_asks_for_the_prompt_s():
    assert completion_sampling(completion(echo=True, logprobs=3), 64, {}).prompt_logprobs == 3
    assert completion_sampling(completion(echo=True), 64, {}).prompt_logprobs is None
    assert completion_sampling(completion(logprobs=3), 64, {}).prompt_logprobs is None


def test_chat_logprobs_are_a_switch_and_a_number():
    assert chat_sampling(chat(logprobs=True), 9, {}).logprobs == 0
    assert chat_sampling(chat(logprobs=True, top_logprobs=4), 9, {}).logprobs == 4
    assert chat_sampling(chat(logprobs=False), 9, {}).logprobs is None


@pytest.mark.parametrize(
    ("make", "values", "param"),
    [
        (completion, {"temperature": -0.1}, "temperature"),
        (completion, {"n": 10**30}, "n"),
        (completion, {"max_tokens": 0}, "max_tokens"),
        (completion, {"max_completion_tokens": -1}, "max_completion_tokens"),
        (completion, {"logit_bias": {"x": 1.0}}, "logit_bias"),
        (completion, {"logit_bias": {"-1": 1.0}}, "logit_bias"),
        (completion, {"logit_bias": {"1": 1e9}}, "logit_bias"),
        (completion, {"logit_bias": {"9" * 5000: 1.0}}, "logit_bias"),
        (completion, {"stop": ["x"] * 17}, "stop"),
        (completion, {"allowed_token_ids": []}, "allowed_token_ids"),
        (completion, {"bad_words": [""]}, "bad_words"),
        (completion, {"stop": ""}, "stop"),
        (completion, {"stop_token_ids": [-1]}, "stop_token_ids"),
        (chat, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
    ],
)
def test_errors_use_the_body_s_names(make, values, param):
    body = make(**values)
    with pytest.raises(ApiError, match=param) as error:
        (chat_sampling if isinstance(body, ChatBody) else completion_sampling)(body, 9, {})
    assert error.value.status == 400
    assert error.value.param == param


def test_a_null_length_is_what_fits_and_none_is_16():
    defaults = {"max_tokens": 30}
    assert completion_sampling(completion(max_tokens=None), 64, {}).max_tokens == 64
    assert completion_sampling(completion(max_tokens=None), 64, defaults).max_tokens == 30
    assert completion_sampling(completion(), 64, defaults).max_tokens == 16


@pytest.mark.parametrize("values", [{}, {"max_tokens": None}, {"max_tokens": 20}])
def test_the_operator_bounds_every_answer(values):
    body = completion(**values, min_tokens=9)
    sampling = completion_sampling(body, 64, {})
    assert fit_context(sampling, body, 4, 64, 20).max_tokens == min(sampling.max_tokens, 20)
    bounded = fit_context(sampling, body, 4, 64, 8)
    assert (bounded.max_tokens, bounded.min_tokens) == (8, 8)
    assert fit_context(chat_sampling(chat(), 64, {}), chat(), 60, 64, 8).max_tokens == 4


def test_options_of_a_stream_need_one():
    with pytest.raises(ApiError, match="stream_options can only") as error:
        completion_sampling(completion(stream_options={"include_usage": True}), 64, {})
    assert error.value.param == "stream_options"
    completion_sampling(completion(stream_options={}), 64, {})


def test_no_top_logprobs_need_no_logprobs():
    assert chat_sampling(chat(top_logprobs=0), 9, {}).logprobs is None


@pytest.mark.parametrize(
    ("values", "length", "fits"),
    [
        ({}, 60, 4),
        ({}, 63, 1),
        ({"max_tokens": 4}, 60, 4),
        ({"max_tokens": 5}, 60, None),
        ({"max_tokens": 1}, 64, None),
        ({}, 64, None),
        ({"max_tokens": 0, "echo": True}, 64, 0),
        ({"max_tokens": 0, "echo": True}, 65, None),
        ({"min_tokens": 10}, 60, 4),
    ],
)
def test_fit_context(values, length, fits):
    body = completion(**values)
    sampling = completion_sampling(body, 64, {})
    if fits is None:
        with pytest.raises(ApiError, match="maximum context length"):
            fit_context(sampling, body, length, 64)
    else:
        assert fit_context(sampling, body, length, 64).max_tokens == fits
