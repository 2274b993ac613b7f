"""Labelled text: one record is a prompt and its label or labels, one JSON object a line on disk."""

import dataclasses
import gzip
import json
import pathlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lora_jax.adapters.task_head import MAX_LABEL_TEXT, MAX_LABELS, HeadKind, TaskHead
from lora_jax.finetune.documents import Document, TextFormat

_SHOWN = 8  # labels in a message


@dataclasses.dataclass(frozen=True)
class Labelled:
    """A user's message and what a head should say of it; only multi_label has not one label."""

    prompt: str
    labels: tuple[str, ...]


def read_labelled(path: pathlib.Path, kind: HeadKind) -> list[Labelled]:
    """Return the records of a .jsonl or .jsonl.gz file.

    Each has `prompt` and `label` (a text, of a count a number), of multi_label `labels`. Raises
    ValueError naming the file and line of a record that is not so, and a file that is no text.
    """
    data = path.read_bytes()
    try:
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        kind_of_file = "gzip of UTF-8 text" if path.suffix == ".gz" else "UTF-8 text"
        raise ValueError(f"{path.name} is not {kind_of_file}: {error}") from error
    lines = text.split("\n")
    records = [
        _parse(line, kind, f"{path.name} line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not records:
        raise ValueError(f"{path.name} holds no records")
    return records


def write_labelled(path: pathlib.Path, records: Iterable[Labelled], kind: HeadKind) -> None:
    """Write records as `read_labelled` reads them."""
    several = kind is HeadKind.MULTI_LABEL
    rows = (
        {"prompt": r.prompt} | ({"labels": r.labels} if several else {"label": r.labels[0]})
        for r in records
    )
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def _parse(line: str, kind: HeadKind, where: str) -> Labelled:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # ValueError: numbers of too many digits, too
        raise ValueError(f"{where} is no JSON: {error}") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"{where} needs the text 'prompt', not empty")
    if kind is HeadKind.MULTI_LABEL:
        labels = row.get("labels")
        if not isinstance(labels, list) or not all(isinstance(x, str) and x for x in labels):
            raise ValueError(f"{where} needs 'labels', a list of texts, for a {kind} head")
        return Labelled(prompt, tuple(labels))
    label = _count(row.get("label")) if kind is HeadKind.COUNT else row.get("label")
    if not isinstance(label, str) or not label:
        count = f"a number from 0 to {MAX_LABELS - 1}"
        wanted = count if kind is HeadKind.COUNT else "a text, not empty"
        raise ValueError(f"{where} needs 'label', {wanted}, for a {kind} head")
    return Labelled(prompt, (label,))


def _count(given: Any) -> str | None:
    """Return a count's label, without leading zeros; None for what is no count that is served."""
    if isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 10:
        given = int(given)
    return str(given) if type(given) is int and 0 <= given < MAX_LABELS else None


def head_of(records: Sequence[Labelled], kind: HeadKind) -> TaskHead:
    """Return the head of all labels that records have, in order; of a count up to the largest.

    Raises ValueError for labels that no engine serves, and where there is nothing to learn.
    """
    labels = {label for record in records for label in record.labels}
    if not labels:
        raise ValueError("no record has a label")
    if len(labels) == 1 and kind is not HeadKind.MULTI_LABEL:
        raise ValueError(
            f"every record has the label {next(iter(labels))[:64]!r}; a {kind} head needs two"
        )
    if len(labels) > MAX_LABELS:
        raise ValueError(f"the records have {len(labels)} labels; a head has {MAX_LABELS} at most")
    if (longest := max(map(len, labels))) > MAX_LABEL_TEXT:
        raise ValueError(
            f"a label has {longest} characters; at most {MAX_LABEL_TEXT} are served: shorten it"
        )
    if kind is HeadKind.COUNT:
        return TaskHead(kind, tuple(str(n) for n in range(max(map(int, labels)) + 1)))
    return TaskHead(kind, tuple(sorted(labels)))


@dataclasses.dataclass(frozen=True)
class Examples:
    """Prompts as documents with one token behind each: the number of its row of `wanted`.

    So what packs and trains text packs and trains these: the only target of a document that
    counts is that number, at the prompt's last token. `wanted` is 1.0 for a row's labels.
    """

    documents: tuple[Document, ...]
    wanted: np.ndarray  # float32 [combinations, labels]


def examples_of(
    records: Sequence[Labelled], head: TaskHead, form: TextFormat, style: str, length: int
) -> Examples:
    """Return the records as examples for a head.

    Raises ValueError for a label that the head has not, and a prompt of more than `length` tokens.
    """
    numbers, documents = {label: n for n, label in enumerate(head.labels)}, []
    combinations: dict[tuple[int, ...], int] = {}
    for record in records:
        unknown = next((label for label in record.labels if label not in numbers), None)
        if unknown is not None:
            some = ", ".join(map(repr, head.labels[:_SHOWN]))
            more = ", ..." if len(head.labels) > _SHOWN else ""
            raise ValueError(
                f"the label {unknown[:64]!r} is not one of the head's {len(numbers)}, which are "
                f"the labels of --data: {some}{more}"
            )
        tokens = form.prompt(record.prompt, style)
        if not 0 < len(tokens) <= length:
            raise ValueError(f"a prompt has {len(tokens)} tokens; --length allows 1 to {length}")
        chosen = tuple(sorted({numbers[label] for label in record.labels}))
        row = combinations.setdefault(chosen, len(combinations))
        documents.append(Document((*tokens, row), len(tokens)))
    wanted = np.zeros((len(combinations), len(numbers)), np.float32)
    for chosen, row in combinations.items():
        wanted[row, list(chosen)] = 1.0
    return Examples(tuple(documents), wanted)
