"""Records of the four ESFT evaluation sets, split into training and held-out text.

A line of those files is a few-shot prompt: several solved segments of one task, then one to
solve. Solved segments come back in other lines, so the split is made between segments, not
between lines: a held-out segment occurs nowhere in the training text, not even in part.
"""

import dataclasses
import gzip
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence

from lora_jax.finetune.records import Record, letters, shingles

SHINGLE = 8  # letters
MAX_SHARED = 0.5  # share of a held-out input's shingles that a training input may contain


@dataclasses.dataclass(frozen=True)
class Task:
    """Text format of one domain's segments."""

    question: str  # what stands before the input
    answer: str  # what stands between the input and its answer
    stop: str  # what solved segments carry after the answer
    decision: re.Pattern[str] | None = None  # where an answer begins with one, its end


_ANY = Task("", "", "")  # of records that are no evaluation set's
INTENT = re.compile(r'^\{"intent": "[^"]*"')
TASKS = {
    "intent": Task("请分析下面这句话的意图，并转化为json格式：", "\n答案：", "。", INTENT),
    "law": Task("请预测以下案件的判决：", "\n判决是：", "。"),
    "summary": Task("请总结下面这段客服对话：", "\n总结：", "。"),
    "translation": Task("Translate Cherokee to English:", "\nTranslation:", ""),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """The records of a domain whose answers say that they are of one kind."""

    domain: str
    answer: re.Pattern[str]


PARTS = {
    "media": Part("intent", re.compile(r'"intent": "\w+-(Play|Listen)"')),  # to play something
    "archaic": Part(
        "translation",  # the older English of the Bible
        re.compile(r"\b(unto|thou|thee|thy|ye|hath|saith|shalt|hast|doth|spake)\b", re.IGNORECASE),
    ),
}


@dataclasses.dataclass(frozen=True)
class Split:
    """Records to train on, and those to measure with."""

    train: tuple[Record, ...]
    heldout: tuple[Record, ...]


def part_of(records: Sequence[Record], part: Part) -> tuple[Record, ...]:
    """Return the records of its domain that belong to a part, in their order."""
    return tuple(record for record in records if part.answer.search(record.answer))


def with_parts(texts: Mapping[str, Sequence[Record]]) -> dict[str, Sequence[Record]]:
    """Return the texts, by name, and the parts of those that have any."""
    parts = {n: part_of(texts[p.domain], p) for n, p in PARTS.items() if p.domain in texts}
    return {**texts, **parts}


def decision_of(text: str) -> re.Pattern[str] | None:
    """Return the pattern of what answers of a text, or of a part of one, decide first."""
    domain = PARTS[text].domain if text in PARTS else text
    return TASKS[domain].decision if domain in TASKS else None


def read_domain(folder: pathlib.Path, domain: str) -> list[Record]:
    """Return the distinct segments of folder/<domain>.jsonl.gz in the order of the file."""
    task = TASKS[domain]
    distinct: dict[str, Record] = {}
    with gzip.open(folder / f"{domain}.jsonl.gz", "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            row = json.loads(line)
            where = f"{domain}.jsonl.gz line {number}"
            for text, answer in segments(row["prompt"], row["raw_answers"][0], task, where):
                record = Record(f"{task.question} {text}{task.answer}", answer)
                distinct.setdefault(letters(text), record)
    return list(distinct.values())


def segments(prompt: str, last_answer: str, task: Task, where: str) -> list[tuple[str, str]]:
    """Return (input, answer) of each segment of a few-shot prompt; the last is answered apart.

    Raises ValueError when the prompt is not written as the task says.
    """
    opening, closing = "User: ", f"{task.answer}\n\nAssistant:"
    if not (prompt.startswith(opening + task.question) and prompt.endswith(closing)):
        raise ValueError(f"{where}: not a prompt of the form {task}")
    body = prompt[len(opening) : -len(closing)] + task.answer + last_answer + task.stop
    pairs = []
    for segment in re.split(rf"(?:^|\n\n){re.escape(task.question)}", body)[1:]:
        text, mark, answer = segment.partition(task.answer)
        if not mark or task.answer in answer:
            raise ValueError(f"{where}: segment {len(pairs)} has not one answer")
        pairs.append((text.strip(), answer.removesuffix(task.stop).strip()))
    return pairs


def split(records: list[Record], heldout_share: float, domain: str) -> Split:
    """Hold out about `heldout_share` of the records and drop what resembles them from the rest.

    Which ones is decided by a hash of the input, so that it does not depend on the order or on
    other records. A record stays in training only if it contains at most MAX_SHARED of the
    shingles of every held-out input. A domain of no evaluation set has no words around its inputs.
    """
    task = TASKS.get(domain, _ANY)
    bound = int(heldout_share * 2**32)
    heldout = [r for r in records if digest(r) < bound]
    chosen = {record.prompt for record in heldout}
    seen = [shingles(question_text(r, task), SHINGLE) for r in heldout]
    train = []
    for record in records:
        if record.prompt not in chosen:
            shingle_set = shingles(question_text(record, task), SHINGLE)
            if all(len(shingle_set & other) <= MAX_SHARED * len(other) for other in seen):
                train.append(record)
    return Split(tuple(train), tuple(heldout))


def question_text(record: Record, task: Task) -> str:
    """Return the input of a record without the words around it."""
    return record.prompt.removeprefix(task.question).removesuffix(task.answer).strip()


def digest(record: Record) -> int:
    """Return 32 bits that depend on the letters of the prompt alone."""
    return int.from_bytes(hashlib.sha256(letters(record.prompt).encode()).digest()[:4], "big")
