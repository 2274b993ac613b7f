"""The trained tokenizer loses nothing, keeps digits apart and knows the turns of a chat."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lora_jax.finetune.assets import tokenizer
from lora_jax.finetune.documents import read_format

TEXTS = ["the cat sat on the mat 1234", "原告与被告离婚", "ᎤᏒᏙᏂ ᎠᏓ"] * 5


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return tokenizer.train_bpe(TEXTS, 300)


@given(text=st.text(alphabet=st.characters(exclude_categories=("Cs",))))
def test_decoding_gives_back_the_text(bpe, text):
    assert bpe.decode(bpe.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_come_first_and_digits_stay_single(bpe):
    assert [bpe.token_to_id(t) for t in tokenizer.SPECIAL_TOKENS] == [0, 1, 2]
    assert bpe.encode("<|im_end|>").ids == [2]
    assert len(bpe.encode("1234").ids) == 4
    assert len(bpe.encode("the").ids) < 3


def test_too_little_text_for_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="not 5000"):
        tokenizer.train_bpe(["ab"], 5000)


def test_saved_folder_carries_the_chat_template(tmp_path, bpe):
    tokenizer.save(bpe, tmp_path, 99)
    read = read_format(tmp_path)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert read.template is not None
    assert read.template.render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n"
    )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 99
    assert read.eos == tokenizer.END_OF_TEXT
