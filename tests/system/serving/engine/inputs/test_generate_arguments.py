"""Arguments of `generate` in every form, and what is said of forms that are none."""

from types import SimpleNamespace

import numpy as np
import pytest

from serving.api.sampling import Sampling
from serving.engine.inputs.generate_arguments import (
    GivenPrompt,
    adapter_and_sampling,
    as_list,
    broadcast,
    given_prompt,
    with_images,
)

ONE, TWO = Sampling(), Sampling(max_tokens=2)


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        ("a", GivenPrompt("a", None)),
        ([1, 2], GivenPrompt(None, (1, 2))),
        (np.array([1, 2]), GivenPrompt(None, (1, 2))),
        ({"prompt": "a"}, GivenPrompt("a", None)),
        ({"prompt_token_ids": [1]}, GivenPrompt(None, (1,))),
        ({"prompt": "a", "prompt_token_ids": [1]}, GivenPrompt("a", (1,))),
    ],
)
def test_forms_of_a_prompt(prompt, want):
    assert given_prompt(prompt) == want


@pytest.mark.parametrize(
    ("prompt", "kind", "words"),
    [
        ({"prompt": "a", "multi_modal_data": {"video": 1}}, ValueError, "other media"),
        ({"prompt": "a", "cache_salt": "x"}, ValueError, "'cache_salt'; known are prompt, "),
        ({}, ValueError, "prompt or prompt_token_ids"),
        ({"prompt": 3}, TypeError, "prompt must be a string, got int"),
        (3.5, TypeError, "got float where a token id"),
        (["a"], TypeError, "got str where a token id"),
        ([True], TypeError, "got bool"),
        (None, TypeError, "got NoneType"),
        (b"ab", TypeError, "got bytes: decode them to a str"),
        (np.array([[1, 2]]), TypeError, "got ndarray where a token id"),
        (np.array([1.5]), TypeError, "got float64 where a token id"),
    ],
)
def test_what_is_no_prompt(prompt, kind, words):
    with pytest.raises(kind, match=words):
        given_prompt(prompt)


def test_images_of_prompts():
    given = given_prompt({"prompt": "a", "multi_modal_data": {"image": 1}})
    assert given.images == (1,)
    assert given_prompt({"prompt": "a", "multi_modal_data": {"image": [1, 2]}}).images == (1, 2)
    assert given_prompt({"prompt": "a", "multi_modal_data": {}}).images == ()
    plain = given_prompt("a")
    assert with_images([plain], None) == [plain]
    assert with_images([plain], [1, 2])[0].images == (1, 2)
    assert [p.images for p in with_images([plain, plain], [[1], []])] == [(1,), ()]
    assert with_images([plain], [])[0].images == ()
    with pytest.raises(ValueError, match="2 prompts but images of 1"):
        with_images([plain, plain], [1])
    with pytest.raises(TypeError, match="given twice"):
        with_images([given], [[2]])
    with pytest.raises(TypeError, match="must be a list, got str"):
        with_images([plain], "a.png")


def test_one_prompt_or_several():
    assert as_list("a") == ["a"]
    assert as_list([1, 2]) == [[1, 2]]
    assert as_list({"prompt": "a"}) == [{"prompt": "a"}]
    assert as_list(["a", [1], {"prompt": "b"}]) == ["a", [1], {"prompt": "b"}]
    assert as_list([]) == []
    (ids,) = as_list(np.array([1, 2]))  # ids of one prompt, not two prompts of one token
    assert given_prompt(ids) == GivenPrompt(None, (1, 2))
    assert len(as_list([np.array([1]), np.array([2])])) == 2
    for wrong, kind in ((None, "NoneType"), (5, "int"), (b"ab", "bytes")):
        with pytest.raises(TypeError, match=f"prompts must be a text, .* got {kind}"):
            as_list(wrong)


def test_vllm_s_order_and_names():
    assert adapter_and_sampling("a", ONE) == ("a", ONE)
    assert adapter_and_sampling(ONE, None) == (None, ONE)
    assert adapter_and_sampling([ONE, TWO], None) == (None, [ONE, TWO])
    assert adapter_and_sampling(None, None, TWO, "sql") == ("sql", TWO)
    request = SimpleNamespace(lora_name="sql", lora_int_id=1, lora_path="p")
    assert adapter_and_sampling(None, None, None, [request, None]) == (["sql", None], None)
    assert adapter_and_sampling(["a", None], None) == (["a", None], None)


def test_a_dict_of_sampling_values_is_no_sum_of_adapters():
    for given in ({"temperature": 0}, {"max_new_tokens": 8, "top_k": 1}):
        with pytest.raises(TypeError, match=r"is no sum of adapters: give Sampling\("):
            adapter_and_sampling(given, None)
    assert adapter_and_sampling({"law": 0.5}, ONE) == ({"law": 0.5}, ONE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((ONE, TWO), "sampling is given twice"),
        ((None, ONE, TWO), "sampling is given twice"),
        (("a", None, None, "b"), "adapter is given twice"),
        ((None, None, None, 3), "lora_name"),
    ],
)
def test_two_values_of_one_argument(arguments, words):
    with pytest.raises(TypeError, match=words):
        adapter_and_sampling(*arguments)


def test_one_value_stands_for_all():
    assert broadcast("adapter", "a", 2, (str, type(None))) == ["a", "a"]
    assert broadcast("sampling", [ONE, TWO], 2, (Sampling,)) == [ONE, TWO]
    with pytest.raises(ValueError, match="3 prompts but 2 values of sampling"):
        broadcast("sampling", [ONE, TWO], 3, (Sampling,))
    with pytest.raises(TypeError, match="sampling must be Sampling or a list of them, got dict"):
        broadcast("sampling", {"max_tokens": 3}, 1, (Sampling,))
    with pytest.raises(TypeError, match="adapter must hold str or None, got int"):
        broadcast("adapter", [3], 1, (str, type(None)))
