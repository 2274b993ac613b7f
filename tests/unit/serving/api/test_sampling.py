import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.api.sampling import Sampling, fold_seed

INT_FIELDS = ["max_tokens", "min_tokens", "n", "top_k", "seed", "logprobs", "prompt_logprobs"]
FLOAT_FIELDS = [
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
]
BOOL_FIELDS = [
    "ignore_eos",
    "echo",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "detokenize",
]
OTHER_FIELDS = ["stop", "stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"]


@pytest.mark.parametrize("field", INT_FIELDS + FLOAT_FIELDS)
@pytest.mark.parametrize(
    "value",
    [True, "1", [1], {}, 10**30, -(10**30), 1 << 20000, math.nan, math.inf, -math.inf, 1j],
    ids=range(11),
)
def test_wrong_and_huge_numbers_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})


@pytest.mark.parametrize("field", [f for f in INT_FIELDS if f != "seed"])
@pytest.mark.parametrize("value", [1.0, -2])
def test_counts_are_whole_and_not_negative(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, r"n must be in \[1, 128\], got 0"),
        ({"n": 129}, "n must be"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 without echo or prompt_logprobs"),
        ({"max_tokens": 3, "min_tokens": 4}, r"min_tokens must be at most max_tokens \(3\), got 4"),
        ({"temperature": -0.1}, r"temperature must be in \[0, 100\]"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, "top_p"),
        ({"min_p": 1.01}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\]"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"logprobs": 21}, r"logprobs must be in \[0, 20\]"),
        ({"stop": ["a"] * 17}, "stop must have at most 16"),
        ({"stop": [""]}, "1 to 1024 characters"),
        ({"stop": ["a" * 1025]}, "1 to 1024 characters"),
        ({"stop": [1]}, "stop must hold strings"),
        ({"stop": ["a"], "detokenize": False}, "detokenize"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
        ({"stop_token_ids": range(65)}, "at most 64"),
        ({"stop_token_ids": "12"}, "stop_token_ids must be a list"),
        ({"stop_token_ids": {1: 2}}, "stop_token_ids must be a list"),
        ({"logit_bias": {"1": 1.0}}, "logit_bias token id must be an integer"),
        ({"logit_bias": {1: math.nan}}, r"logit_bias\[1\]"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101}}, r"logit_bias\[1\] must be in \[-100, 100\]"),
        ({"logit_bias": dict.fromkeys(range(301), 0.0)}, "at most 300"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"allowed_token_ids": []}, "allowed_token_ids must name at least one"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids entry must be in"),
        ({"allowed_token_ids": range(301)}, "allowed_token_ids must have at most 300"),
        ({"bad_words": "word"}, "bad_words must be a list"),
        ({"bad_words": [1]}, "bad_words must hold strings"),
        ({"bad_words": [" "]}, "bad_words must have 1 to 64 characters"),
        ({"bad_words": ["a" * 65]}, "bad_words must have 1 to 64 characters"),
        ({"bad_words": ["a"] * 65}, "bad_words must have at most 64"),
    ],
)
def test_bounds_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**fields)


@pytest.mark.parametrize("field", BOOL_FIELDS)
@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_flags_are_true_or_false(field, value):
    with pytest.raises(ValueError, match=field):
        Sampling(**{field: value})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(INT_FIELDS + FLOAT_FIELDS + BOOL_FIELDS + OTHER_FIELDS),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=4,
    ),
)
def test_anything_else_is_a_value_error_or_a_usable_value(field, value):
    try:
        sampling = Sampling(**{field: value})
    except ValueError:
        return
    assert hash(sampling) == hash(Sampling(**{field: value}))
    for name in FLOAT_FIELDS:
        assert math.isfinite(getattr(sampling, name))


def test_values_are_normalised():
    sampling = Sampling(
        top_k=-1,
        temperature=1,
        stop="end",
        stop_token_ids=[3, 4],
        logit_bias={5: 1},
        max_tokens=0,
        echo=True,
    )
    assert sampling.top_k == 0
    assert isinstance(sampling.temperature, float)
    assert sampling.stop == ("end",)
    assert sampling.stop_token_ids == (3, 4)
    assert sampling.logit_bias == {5: 1.0}


@pytest.mark.parametrize(
    ("fields", "is_left"),
    [
        ({"allowed_token_ids": [2, 7]}, True),
        ({"allowed_token_ids": [2, 7], "min_tokens": 1}, False),
        ({"allowed_token_ids": [2, 8], "min_tokens": 1}, True),
        ({"allowed_token_ids": [2, 8], "min_tokens": 1, "stop_token_ids": [8]}, False),
        ({"allowed_token_ids": [7]}, False),
        ({"allowed_token_ids": [4]}, True),
        ({"allowed_token_ids": [3]}, True),  # of a word of two tokens the last one is barred
        ({"min_tokens": 1}, True),
        ({"allowed_token_ids": [2], "min_tokens": 1, "structured_outputs": {"regex": "a"}}, True),
    ],
)
def test_an_answer_that_cannot_begin_is_refused(fields, is_left):
    sampling, bad_words = Sampling(**fields), ((7,), (3, 4))
    if is_left:
        sampling.check_first(bad_words, end_ids=(2,))
    else:
        with pytest.raises(ValueError, match=r"leave no first token.*Allow other tokens"):
            sampling.check_first(bad_words, end_ids=(2,))


@pytest.mark.parametrize("top_p", [5e-324, 1e-46, 1e-40, 1e-3, 1.0])
def test_the_device_has_no_top_p_of_zero_that_keeps_no_token(top_p):
    smallest_normal = np.finfo(np.float32).tiny  # devices take smaller ones for 0
    kept = np.float32(Sampling(top_p=top_p).top_p)
    assert kept == max(np.float32(top_p), smallest_normal)


@pytest.mark.parametrize(
    ("temperature", "kept"), [(0, 0.0), (1e-6, 0.0), (1e-3, 1e-2), (0.5, 0.5), (100, 100.0)]
)
def test_tiny_temperatures_are_greedy_or_raised(temperature, kept):
    sampling = Sampling(temperature=temperature)
    assert sampling.temperature == kept
    assert sampling.greedy == (kept == 0.0)


def test_a_bias_given_by_the_caller_cannot_change_later():
    bias = {1: 2.0}
    sampling = Sampling(logit_bias=bias)
    bias[1] = math.nan
    assert sampling.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    "fields", [{"repetition_penalty": 1.1}, {"presence_penalty": -1}, {"frequency_penalty": 0.1}]
)
def test_penalties_use_the_history(fields):
    assert Sampling(**fields).uses_history
    assert not Sampling().uses_history


def test_token_ids_outside_the_vocabulary_are_refused():
    Sampling(logit_bias={99: 1.0}, stop_token_ids=[99]).check_vocab(100)
    with pytest.raises(ValueError, match=r"logit_bias token id must be in \[0, 99\], got 100"):
        Sampling(logit_bias={100: 1.0}).check_vocab(100)
    with pytest.raises(ValueError, match="stop_token_ids token id"):
        Sampling(stop_token_ids=[100]).check_vocab(100)
    with pytest.raises(ValueError, match="allowed_token_ids token id"):
        Sampling(allowed_token_ids=[100]).check_vocab(100)


def test_seeds_fold_into_31_bits_apart_for_each_choice():
    folded = [fold_seed(seed, index) for seed in (-(2**63), 0, 2**63 - 1) for index in range(128)]
    assert len(set(folded)) == len(folded)
    assert all(0 <= seed < 2**31 for seed in folded)
    assert fold_seed(5, 1) == fold_seed(5, 1)


def test_what_vllm_leaves_out_is_nothing():
    names = ("max_tokens", "stop", "stop_token_ids", "logit_bias", "bad_words", "seed")
    made = Sampling(**dict.fromkeys(names))
    assert made == Sampling(max_tokens=2**31 - 1)
    assert (made.stop, made.logit_bias) == ((), {})


def test_a_field_that_there_is_not_is_named():
    with pytest.raises(TypeError, match=r"no field 'best_of'\. docs/how-to/from-vllm-llm\.md says"):
        Sampling(max_tokens=3, best_of=2)  # type: ignore[call-arg]
    made = Sampling(3, 0.5, n=2)
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made
    assert dataclasses.replace(made, n=1).max_tokens == 3
