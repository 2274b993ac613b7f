"""Values of flags: sizes, lists, adapters, and what is refused."""

import argparse
import json

import pytest

from serving.cli.flag_values import (
    LoraModuleFlag,
    beside_base,
    json_list,
    length_or_auto,
    lora_module,
    port,
    whole_number,
)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7", 7),
        ("-3", -3),
        ("1k", 1000),
        ("2K", 2048),
        ("25.6k", 25600),
        ("1m", 10**6),
        ("4G", 4 << 30),
        ("1t", 10**12),
    ],
)
def test_sizes_as_people_write_them(text, number):
    assert whole_number(text) == number


def test_sglang_counts_the_base_model_as_an_adapter_of_the_batch():
    assert [beside_base(text) for text in ("8", "1", "0", "1k")] == [7, 1, 1, 999]


@pytest.mark.parametrize("text", ["", "k", "1 k", "1kk", "1.5", "1e3", "auto"])
def test_what_is_no_number(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number, such as 16"):
        whole_number(text)


def test_powers_of_two_take_no_fraction():
    with pytest.raises(argparse.ArgumentTypeError, match="powers of ten"):
        whole_number("1.5K")


@pytest.mark.parametrize(
    ("text", "length"), [("auto", None), ("-1", None), ("AUTO", None), ("9", 9)]
)
def test_a_length_may_be_left_to_the_model(text, length):
    assert length_or_auto(text) == length


def test_what_is_no_length_is_told_of_auto():
    with pytest.raises(argparse.ArgumentTypeError, match="got 'long'; auto is the model's own"):
        length_or_auto("long")


def test_ports():
    assert [port(text) for text in ("0", "65535")] == [0, 65535]
    for text in ("65536", "-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="65535"):
            port(text)


@pytest.mark.parametrize(
    ("text", "items"),
    [('["*"]', ("*",)), ("a, b", ("a", "b")), ("https://x.org", ("https://x.org",)), ("[]", ())],
)
def test_lists(text, items):
    assert json_list(text) == items


@pytest.mark.parametrize("text", ["[1]", "[", '["a", null]'])
def test_what_is_no_list_of_texts(text):
    with pytest.raises(argparse.ArgumentTypeError, match="JSON"):
        json_list(text)


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("sql=path/to/sql", LoraModuleFlag("sql", "path/to/sql")),
        ("sql=a=b", LoraModuleFlag("sql", "a=b")),
        ("some/where/law", LoraModuleFlag("law", "some/where/law")),
        (json.dumps({"name": "a", "path": "p", "base_model_name": "m"}), LoraModuleFlag("a", "p")),
        (
            json.dumps({"lora_name": "a", "lora_path": "p", "pinned": True}),
            LoraModuleFlag("a", "p", pinned=True),
        ),
    ],
)
def test_adapters(text, module):
    assert lora_module(text) == module


NOTHING = ["", "=p", "a=", "{", '{"name": "a"}', '{"name": 1, "path": "p"}', "{}"]
NOTHING += ['{"name": "a", "path": "p", "pinned": 1}', '{"name": "a", "path": "p", "rank": 8}']


@pytest.mark.parametrize("text", NOTHING)
def test_adapters_that_say_nothing(text):
    with pytest.raises(ValueError, match="--lora-modules"):
        lora_module(text)
