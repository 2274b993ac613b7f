"""Added tokens of an adapter's tokenizer files, in the forms that libraries have written."""

import json

import pytest

from lora_jax.adapters.added_tokens import AddedToken
from lora_jax.adapters.formats.folder import AdapterFolder
from lora_jax.adapters.formats.tokenizer_files import read_added

CALL = AddedToken("<call>", 7, special=True)
WORD = AddedToken("wörd", 9, special=False, lstrip=True)


def read(folder, **files):
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / f"{name}.json").write_text(text)
    return read_added(AdapterFolder(folder))


def entry(token, **more):
    return {"content": token.content, "special": token.special, "lstrip": token.lstrip, **more}


def test_every_form_says_the_same(tmp_path):
    whole = {"model": {"vocab": {"a": 0}}, "added_tokens": [entry(WORD, id=9), entry(CALL, id=7)]}
    decoder = {"added_tokens_decoder": {"7": entry(CALL), "9": entry(WORD)}}
    for name, files in {
        "new": {"tokenizer": whole},
        "middle": {"tokenizer_config": decoder},
        "both": {"tokenizer": whole, "tokenizer_config": decoder},
    }.items():
        (tmp_path / name).mkdir()
        assert read(tmp_path / name, **files) == (CALL, WORD)
    assert read(tmp_path, added_tokens={"wörd": 9}) == (AddedToken("wörd", 9, special=False),)


def test_a_folder_without_them_adds_nothing(tmp_path):
    assert read(tmp_path) == ()
    assert read(tmp_path, tokenizer={"model": {}}, tokenizer_config={"eos_token": "</s>"}) == ()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"tokenizer": "{"}, "tokenizer.json: not valid JSON"),
        ({"tokenizer": {"added_tokens": {"a": 1}}}, "added_tokens must be a list"),
        ({"tokenizer": {"added_tokens": [{"content": "<a>"}]}}, "has the id 'None'"),
        ({"tokenizer": {"added_tokens": [{"id": 3}]}}, "the added token 3 has no text"),
        ({"tokenizer_config": {"added_tokens_decoder": [1]}}, "must map ids to tokens"),
        ({"tokenizer_config": {"added_tokens_decoder": {"-1": entry(CALL)}}}, "the id '-1'"),
        ({"added_tokens": {"<a>": True}}, "added_tokens.json: an added token has the id 'True'"),
        (
            {"tokenizer": {"added_tokens": [entry(CALL, id=7)]}, "added_tokens": {"<call>": 8}},
            "'<call>' has the ids 7 and 8",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path, files, words):
    with pytest.raises(ValueError, match=words):
        read(tmp_path, **files)
