"""Defaults of sampling: the model's file, another folder's, the operator's, in this order."""

import json

import pytest

from serving.api.generation_config import GenerationConfig, read_generation_config

QWEN = {
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": None,
    "repetition_penalty": 1.05,
    "eos_token_id": [151645, -7],
    "transformers_version": "4.51.0",
}


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "model", QWEN)


def write(folder, content) -> str:
    folder.mkdir()
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return str(folder)


def test_the_model_s_own_file(model):
    got = read_generation_config(model, "auto", {})
    want = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert got == GenerationConfig(want)  # its ends of a text are the tokenizer's to find


def test_no_file_says_nothing(model, tmp_path):
    assert read_generation_config(model, "vllm", {}) == GenerationConfig()
    assert read_generation_config(str(tmp_path), "auto", {}) == GenerationConfig()


def test_another_folder_s_file(model, tmp_path):
    other = write(tmp_path / "other", {"max_new_tokens": 64, "eos_token_id": 3})
    got = read_generation_config(model, other, {})
    assert got == GenerationConfig({"max_tokens": 64}, (3,), most_tokens=64)


def test_the_model_s_own_length_is_a_default_and_the_operator_s_a_bound(tmp_path):
    model = write(tmp_path / "model", {"max_new_tokens": 64})
    assert read_generation_config(model, "auto", {}).most_tokens is None
    assert read_generation_config(model, "auto", {"max_new_tokens": 9}).most_tokens == 9
    assert read_generation_config(model, model, {}).most_tokens == 64
    assert read_generation_config(model, model, {"max_new_tokens": None}).most_tokens is None


def test_the_operator_s_values_win_and_null_unsets(model):
    given = {"temperature": 0.2, "top_k": None, "max_new_tokens": 9, "eos_token_id": [1, 2]}
    got = read_generation_config(model, "auto", given)
    want = {"temperature": 0.2, "repetition_penalty": 1.05, "max_tokens": 9}
    assert got == GenerationConfig(want, (1, 2), most_tokens=9)
    assert read_generation_config(model, "vllm", {"top_k": 4}) == GenerationConfig({"top_k": 4})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"temperature": -1}, r"other/generation_config.json .*: temperature must be in"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"top_k": "many"}, "top_k must be an integer"),
        ({"max_new_tokens": -1}, "max_new_tokens must be in"),
        ({"eos_token_id": "end"}, "eos_token_id must be a token id or a list of them, got 'end'"),
        ({"eos_token_id": [True]}, "eos_token_id must be"),
        ({"eos_token_id": [-1]}, "eos_token_id must be"),
        ("[]", "must hold an object"),
        ("{", "is not JSON"),
    ],
)
def test_mistakes_are_named(model, tmp_path, content, problem):
    other = write(tmp_path / "other", content)
    with pytest.raises(ValueError, match=problem):
        read_generation_config(model, other, {})


def test_a_folder_that_is_named_must_have_the_file(model, tmp_path):
    with pytest.raises(ValueError, match=r"has no generation_config\.json"):
        read_generation_config(model, str(tmp_path), {})


def test_tokens_that_the_model_does_not_have():
    GenerationConfig({}, (259,)).check_vocab(260)
    with pytest.raises(ValueError, match=r"eos_token_id must be in \[0, 259\], got 260"):
        GenerationConfig({}, (260,)).check_vocab(260)
