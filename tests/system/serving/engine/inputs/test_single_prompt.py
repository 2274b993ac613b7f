"""One prompt of a caller, in Engine's forms and in vLLM's."""

from types import SimpleNamespace
from typing import Any

import pytest

from serving.api.sampling import Sampling
from serving.engine.inputs.single_prompt import single_prompt

TOKENIZER: Any = SimpleNamespace(encode_again=lambda text: list(text.encode()))
DEFAULT, GIVEN = Sampling(max_tokens=1), Sampling(max_tokens=2)


def own(adapter):
    return TOKENIZER


def test_a_text_gets_tokens_and_the_default_sampling():
    read = single_prompt(own, None, DEFAULT, "ab", "sql", None)
    assert (read.text, read.ids, read.images) == ("ab", [97, 98], ())
    assert (read.adapter, read.sampling) == ("sql", DEFAULT)


def test_vllm_s_names_and_places_mean_the_same():
    plain = single_prompt(own, None, DEFAULT, [5, 6], "sql", GIVEN)
    lora: Any = SimpleNamespace(lora_name="sql")
    second = single_prompt(
        lambda adapter: TOKENIZER, None, DEFAULT, [5, 6], GIVEN, None, lora_request=lora
    )
    named = single_prompt(
        lambda adapter: TOKENIZER, None, DEFAULT, [5, 6], "sql", None, sampling_params=GIVEN
    )
    assert plain == second == named
    assert plain.ids == [5, 6]


@pytest.mark.parametrize(
    ("adapter", "sampling", "images", "error"),
    [
        (7, None, None, "adapter must be str or Mapping or None or a list of them, got int"),
        (None, "x", None, "sampling must be Sampling or a list of them, got str"),
        (GIVEN, GIVEN, None, "sampling is given twice"),
        (["a", "b"], None, None, "1 prompts but 2 values of adapter"),
        (None, None, [b"x"], "takes text only"),
    ],
)
def test_what_is_not_understood_is_named(adapter, sampling, images, error):
    with pytest.raises((TypeError, ValueError), match=error):
        single_prompt(own, None, DEFAULT, "a", adapter, sampling, images)
