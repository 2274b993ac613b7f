"""Records survive the disk, and a bad line is refused by file and number."""

import gzip

import pytest

from lora_jax.finetune import records
from lora_jax.finetune.records import Record

SOME = [Record("問 ᎤᏒ\n答案：", '{"a": "b"}'), Record("line\u2028separator\x0b", "é\nü")]


@pytest.mark.parametrize("packed", [False, True])
def test_written_records_are_read_back(tmp_path, packed):
    path = tmp_path / "some.jsonl"
    records.write_jsonl(path, SOME)
    if packed:
        path = path.with_suffix(".jsonl.gz")
        path.write_bytes(gzip.compress((tmp_path / "some.jsonl").read_bytes()))
    assert records.read_jsonl(path) == SOME


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[1, 2]", "line 2 needs the strings"),
        ('{"prompt": "a"}', "line 2 needs the strings"),
        ('{"prompt": "a", "answer": 3}', "line 2 needs the strings"),
        ('{"prompt": "a", "answer": ""}', "line 2 needs the strings"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n")
    with pytest.raises(ValueError, match=rf"bad\.jsonl {message}"):
        records.read_jsonl(path)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "none.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="no records"):
        records.read_jsonl(tmp_path / "none.jsonl")


def test_letters_are_what_makes_two_texts_the_same():
    assert records.letters("Hello, Ｗorld! １") == records.letters("hello world 1")
    assert records.letters("a b") != records.letters("a c")


def test_shingles_are_every_run_of_letters():
    assert records.shingles("ab, cd", 3) == {"abc", "bcd"}
    assert records.shingles("a!", 3) == {"a"}
