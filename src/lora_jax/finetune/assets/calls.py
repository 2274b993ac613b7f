"""Turns the intent text of the shipped model into tool calls, for the adapter that makes them.

    python -m lora_jax.finetune.assets.calls --data DIR --out DIR

DATA holds the ESFT evaluation set intent as .jsonl.gz. OUT gets train.jsonl and heldout.jsonl: the
same sentences are held out as by make_assets. The answer is a call as Hermes and Qwen write it; its
function is the intent, its arguments are the slots. Each sentence for training comes again with
other values in its slots, so that an adapter learns to take them from the sentence.
"""

import argparse
import json
import pathlib
import random
import sys
from collections.abc import Sequence
from typing import Any

from lora_jax.finetune.assets.make_assets import HELDOUT_SHARE
from lora_jax.finetune.esft_text import TASKS, question_text, read_domain, split
from lora_jax.finetune.records import Record, write_jsonl

OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
TURNS = 6  # times that a sentence comes with other values
_LONGEST = 24  # letters of a value
Call = tuple[str, str, dict[str, Any]]  # sentence, function, arguments


def call_of(record: Record) -> Call:
    """Return the call of a record of the intent text; ValueError for an answer that is none."""
    answer = json.loads(record.answer)
    if not isinstance(answer, dict) or not isinstance(answer.get("slots"), dict):
        raise ValueError(f"not an intent with slots: {record.answer[:80]!r}")
    return question_text(record, TASKS["intent"]), answer["intent"], answer["slots"]


def as_record(call: Call) -> Record:
    """Return a sentence and its call as a record to learn."""
    sentence, function, arguments = call
    text = json.dumps({"name": function, "arguments": arguments}, ensure_ascii=False)
    return Record(sentence, f"{OPEN}{text}{CLOSE}")


def varied(calls: Sequence[Call], seed: int) -> list[Call]:
    """Return each call with values that others have in the same slots, where any can change."""
    rng, values = random.Random(seed), _values(calls)
    return [new for new in (_with_others(call, values, rng) for call in calls) if new is not None]


def _values(calls: Sequence[Call]) -> dict[str, list[str]]:
    """Return the values of each slot that stand in their sentences."""
    values: dict[str, list[str]] = {}
    for sentence, _, arguments in calls:
        for slot, value in arguments.items():
            if isinstance(value, str) and 1 < len(value) <= _LONGEST and value in sentence:
                values.setdefault(slot, []).append(value)
    return values


def _with_others(call: Call, values: dict[str, list[str]], rng: random.Random) -> Call | None:
    sentence, function, arguments = call[0], call[1], dict(call[2])
    changed = False
    for slot in sorted(arguments, key=lambda slot: -len(str(arguments[slot]))):
        value = arguments[slot]
        if not isinstance(value, str) or len(value) < 2 or slot not in values:
            continue
        others = sum(value in str(other) for other in arguments.values())
        if sentence.count(value) != 1 or others != 1:  # what is changed must be this value alone
            continue
        arguments[slot] = rng.choice(values[slot])
        sentence, changed = sentence.replace(value, arguments[slot]), True
    return (sentence, function, arguments) if changed else None


def make(data: pathlib.Path, out: pathlib.Path) -> None:
    """Write the records for training and those held out."""
    parts = split(read_domain(data, "intent"), HELDOUT_SHARE, "intent")
    calls = [call_of(record) for record in parts.train]
    records = [as_record(c) for c in calls]
    records += [as_record(c) for turn in range(TURNS) for c in varied(calls, turn)]
    random.Random(0).shuffle(records)
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "train.jsonl", records)
    write_jsonl(out / "heldout.jsonl", [as_record(call_of(r)) for r in parts.heldout])


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.finetune.assets.calls")
    parser.add_argument("--data", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args(argv)
    make(args.data, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
