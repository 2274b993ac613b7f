import pytest
from support.cases.tiny_tokenizers import write_json

from lora_jax.adapters.added_tokens import AddedToken
from serving.text.tokenizer_files import TokenizerFiles


def folder_with(path, **files):
    for name, data in files.items():
        write_json(path / f"{name}.json", data)
    return TokenizerFiles(path)


def test_an_empty_folder_says_nothing(tmp_path):
    files = TokenizerFiles(tmp_path)
    assert (files.special_tokens(), files.added_tokens()) == ({}, [])
    assert (files.eos_token_ids(), files.chat_template()) == ((), None)
    assert not files.has("tokenizer.json")


def test_special_tokens_may_be_texts_or_objects_in_either_file(tmp_path):
    files = folder_with(
        tmp_path,
        special_tokens_map={"bos_token": {"content": "<s>"}, "eos_token": "</old>"},
        tokenizer_config={"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None},
    )
    assert files.special_tokens() == {"bos_token": "<s>", "eos_token": "</s>"}


def test_the_newer_dialect_of_added_tokens(tmp_path):
    files = folder_with(
        tmp_path,
        tokenizer_config={
            "added_tokens_decoder": {
                "11": {"content": "<b>", "special": False, "rstrip": True, "normalized": True},
                "9": {"content": "<a>", "special": True},
            },
            "eos_token": "<e>",
        },
    )
    assert files.added_tokens() == [
        AddedToken("<a>", 9),
        AddedToken("<b>", 11, special=False, rstrip=True, normalized=True),
        AddedToken("<e>"),
    ]


def test_the_older_dialect_of_added_tokens(tmp_path):
    files = folder_with(
        tmp_path,
        added_tokens={"<b>": 11, "<a>": 9},
        special_tokens_map={"additional_special_tokens": ["<a>", {"content": "<c>"}]},
    )
    assert files.added_tokens() == [
        AddedToken("<a>", 9, special=True),
        AddedToken("<b>", 11, special=False),
        AddedToken("<c>"),
    ]


@pytest.mark.parametrize(
    ("generation", "model", "ids"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 1}, (5, 6)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({}, {"eos_token_id": 1}, (1,)),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
        ({"eos_token_id": True}, {}, ()),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(tmp_path, generation, model, ids):
    files = folder_with(tmp_path, generation_config=generation, config=model)
    assert files.eos_token_ids() == ids


def test_chat_templates_in_every_place_and_shape(tmp_path):
    assert folder_with(tmp_path, tokenizer_config={"chat_template": "A"}).chat_template() == "A"
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    assert folder_with(tmp_path, tokenizer_config={"chat_template": named}).chat_template() == "D"
    assert folder_with(tmp_path, chat_template={"chat_template": "J"}).chat_template() == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert TokenizerFiles(tmp_path).chat_template() == "F"


@pytest.mark.parametrize(("text", "message"), [("{", "is not JSON"), ("[1]", "hold an object")])
def test_broken_files_are_named(tmp_path, text, message):
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"tokenizer_config.json .*{message}"):
        TokenizerFiles(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"no model folder {tmp_path / 'absent'}"):
        TokenizerFiles(tmp_path / "absent")
