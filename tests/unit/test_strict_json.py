"""JSON that json.loads reads is accepted; keys that stand twice are refused by name."""

import pytest

from lora_jax import strict_json


def test_what_has_each_key_once_is_read():
    text = '{"a": [1, {"a": 2}], "b": {"a": null}}'
    assert strict_json.loads(text) == {"a": [1, {"a": 2}], "b": {"a": None}}
    assert strict_json.loads(b"[1]") == [1]


@pytest.mark.parametrize(
    ("text", "name"),
    [('{"r": 8, "b": 1, "r": 16}', "r"), ('[{"x": {"é": 1, "é": 1}}]', "é")],
)
def test_a_key_that_stands_twice_is_named(text, name):
    with pytest.raises(ValueError, match=f"the key '{name}' stands twice; keep one of them"):
        strict_json.loads(text)


def test_a_file_of_too_many_values_is_refused_before_it_is_read():
    assert strict_json.read_object(b'{"a": [1, 2]}', 10) == {"a": [1, 2]}
    with pytest.raises(ValueError, match="it holds more than 2 JSON values"):
        strict_json.read_object(b'{"a": [1, 2, 3, 4]}', 2)
