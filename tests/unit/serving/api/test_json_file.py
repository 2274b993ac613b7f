"""A model's small JSON files: what they hold, and what is said of those that are wrong."""

import pytest

from serving.api.json_file import read_object


def test_an_object_is_read_and_no_file_says_nothing(tmp_path):
    (tmp_path / "a.json").write_text('{"é": [1]}', encoding="utf-8")
    assert read_object(tmp_path / "a.json") == {"é": [1]}
    assert read_object(tmp_path / "b.json") == {}


def test_a_key_that_stands_twice_is_named(tmp_path):
    (tmp_path / "a.json").write_text('{"top_k": 1, "top_k": 2}')
    with pytest.raises(ValueError, match=rf"{tmp_path.name}/a.json: the key 'top_k' stands twice"):
        read_object(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("content", "said"), [(b"{", "is not JSON"), (b"\xff", "is not JSON"), (b"[]", "an object")]
)
def test_what_is_wrong_names_folder_and_file(tmp_path, content, said):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=rf"{tmp_path.name}/a.json .*{said}"):
        read_object(tmp_path / "a.json")
