"""Training text: one record is a prompt and its answer, one JSON object a line on disk."""

import dataclasses
import gzip
import json
import pathlib
import unicodedata
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Record:
    """A user's message and the wanted answer; both are not empty."""

    prompt: str
    answer: str


def read_jsonl(path: pathlib.Path) -> list[Record]:
    """Return the records of a .jsonl or .jsonl.gz file with string fields `prompt` and `answer`.

    Raises ValueError naming the file and line of a record that is not so.
    """
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8").split("\n")
    records = [
        parse_record(line, f"{path.name} line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not records:
        raise ValueError(f"{path.name} holds no records")
    return records


def parse_record(line: str, where: str) -> Record:
    """Return the record of a line of JSON. Raises ValueError naming `where` for any other line."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    prompt, answer = (row.get("prompt"), row.get("answer")) if isinstance(row, dict) else ("", "")
    if not (isinstance(prompt, str) and isinstance(answer, str) and prompt and answer):
        raise ValueError(f"{where} needs the strings 'prompt' and 'answer', not empty")
    return Record(prompt, answer)


def write_jsonl(path: pathlib.Path, records: Iterable[Record]) -> None:
    """Write a record a line, as `parse_record` reads it."""
    lines = (json.dumps(dataclasses.asdict(r), ensure_ascii=False) + "\n" for r in records)
    path.write_text("".join(lines), encoding="utf-8")


def letters(text: str) -> str:
    """Return the letters and digits of a text alone, in one case and width: its identity."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(c for c in folded if unicodedata.category(c)[0] in "LN")


def shingles(text: str, width: int) -> set[str]:
    """Return every run of `width` letters of the text (the whole text if it is shorter)."""
    plain = letters(text)
    return {plain[i : i + width] for i in range(max(len(plain) - width + 1, 1))}
