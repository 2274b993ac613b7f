"""Labelled text on disk, and as documents whose one target is a row of wanted labels."""

import gzip

import numpy as np
import pytest
from support.cases.finetune_cases import make_folder

from lora_jax.adapters.task_head import HeadKind
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.labelled import (
    Labelled,
    examples_of,
    head_of,
    read_labelled,
    write_labelled,
)

RECORDS = [Labelled("what is one", ("b",)), Labelled("two", ("a",)), Labelled("one", ("b",))]
SEVERAL = [Labelled("what", ("b", "a")), Labelled("one", ()), Labelled("two", ("a",))]


@pytest.mark.parametrize(
    ("kind", "records"), [(HeadKind.CLASS, RECORDS), (HeadKind.MULTI_LABEL, SEVERAL)]
)
def test_what_is_written_is_read(tmp_path, kind, records):
    write_labelled(tmp_path / "x.jsonl", records, kind)
    assert read_labelled(tmp_path / "x.jsonl", kind) == records


@pytest.mark.parametrize(
    ("kind", "line", "message"),
    [
        (HeadKind.CLASS, '{"prompt": "a"', "line 2 is no JSON"),
        (HeadKind.CLASS, '{"prompt": "", "label": "a"}', "needs the text 'prompt'"),
        (HeadKind.CLASS, '["a"]', "needs the text 'prompt'"),
        (HeadKind.CLASS, '{"prompt": "a", "label": 3}', "needs 'label', a text"),
        (HeadKind.COUNT, '{"prompt": "a", "label": -1}', "needs 'label', a number from 0"),
        (HeadKind.COUNT, '{"prompt": "a", "label": "many"}', "needs 'label', a number"),
        (HeadKind.COUNT, '{"prompt": "a", "label": true}', "needs 'label', a number"),
        (HeadKind.COUNT, '{"prompt": "a", "label": 1024}', "a number from 0 to 1023"),
        (HeadKind.COUNT, '{"prompt": "a", "label": "9999999999"}', "a number from 0 to 1023"),
        (HeadKind.COUNT, f'{{"prompt": "a", "label": {"9" * 5000}}}', "line 2 is no JSON"),
        (HeadKind.MULTI_LABEL, '{"prompt": "a", "label": "b"}', "needs 'labels', a list"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, kind, line, message):
    file = tmp_path / "x.jsonl"
    file.write_text(f"\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_labelled(file, kind)
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no records"):
        read_labelled(file, kind)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.jsonl", b"\xff\xfe", "x.jsonl is not UTF-8 text"),
        ("x.jsonl.gz", b"\x1f\x8bxx", "x.jsonl.gz is not gzip"),
        ("x.jsonl.gz", b"{}", "x.jsonl.gz is not gzip"),
        ("x.jsonl.gz", gzip.compress(b"{}" * 99)[:-12], "x.jsonl.gz is not gzip"),
    ],
)
def test_a_file_that_is_no_text_is_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_labelled(tmp_path / name, HeadKind.CLASS)


def test_labels_that_no_engine_serves_are_refused_before_a_training():
    many = [Labelled("a", (str(n),)) for n in range(1025)]
    with pytest.raises(ValueError, match="1025 labels; a head has 1024 at most"):
        head_of(many, HeadKind.CLASS)
    with pytest.raises(ValueError, match="a label has 257 characters; at most 256"):
        head_of([*RECORDS, Labelled("a", ("x" * 257,))], HeadKind.CLASS)
    for kind in (HeadKind.CLASS, HeadKind.COUNT):
        with pytest.raises(ValueError, match=f"has the label '0'; a {kind} head needs two"):
            head_of([Labelled("a", ("0",))] * 2, kind)
    assert head_of([Labelled("a", ("0",))], HeadKind.MULTI_LABEL).labels == ("0",)


def test_a_head_has_the_labels_of_its_text(tmp_path):
    assert head_of(RECORDS, HeadKind.CLASS).labels == ("a", "b")
    lines = '{"prompt": "a", "label": 3}\n{"prompt": "b", "label": "01"}'
    (tmp_path / "n.jsonl").write_text(lines)
    counts = read_labelled(tmp_path / "n.jsonl", HeadKind.COUNT)
    assert head_of(counts, HeadKind.COUNT).labels == ("0", "1", "2", "3")
    with pytest.raises(ValueError, match="no record has a label"):
        head_of(SEVERAL[1:2], HeadKind.MULTI_LABEL)


def test_examples_are_prompts_as_a_server_has_them(tmp_path):
    form = read_format(make_folder(tmp_path / "tiny"))
    head = head_of(SEVERAL, HeadKind.MULTI_LABEL)
    made = examples_of(SEVERAL, head, form, "chat", 64)
    np.testing.assert_array_equal(made.wanted, [[1, 1], [0, 0], [1, 0]])
    for row, (document, record) in enumerate(zip(made.documents, SEVERAL, strict=True)):
        assert document.tokens == (*form.prompt(record.prompt, "chat"), row)
        assert document.num_prompt == len(document.tokens) - 1
    with pytest.raises(ValueError, match=r"label 'z' is not one of the head's 2.*: 'a', 'b'"):
        examples_of([Labelled("a", ("z",))], head, form, "chat", 64)
    with pytest.raises(ValueError, match="--length allows 1 to 3"):
        examples_of(SEVERAL, head, form, "chat", 3)
