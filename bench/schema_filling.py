"""The shipped adapter `intent` and the schema of the text that it was trained on: does it fill it?

`python -m bench.schema_filling --data DIR --out DIR` reads the ESFT evaluation set intent
(DIR/intent.jsonl.gz). The schema has the intents and slots of the training answers. The base and
the adapter answer the held-out requests, greedy, free and bound by the schema. "valid" counts
answers that the schema accepts, "right" those with the intent of the reference; "tokens" is the
length of all answers.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema

from bench import record
from lora_jax.finetune.assets.make_assets import HELDOUT_SHARE
from lora_jax.finetune.esft_text import read_domain, split
from lora_jax.finetune.records import Record
from serving import Engine, Sampling
from serving.api.structured_outputs import StructuredOutputs

NAME = "intent"
MODEL = Path(__file__).parents[1] / "assets" / "tiny-moe"
LONGEST = 24  # characters of a slot's value
MOST = 4  # values of a slot that is a list
Answer = Mapping[str, Any]


def schema_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the schema of answers {"intent": text, "slots": {name: text or list of texts}}."""
    text = {"type": "string", "maxLength": LONGEST}
    one_or_more = {"anyOf": [text, {"type": "array", "items": text, "maxItems": MOST}]}
    slots: dict[str, Any] = {}
    for answer in answers:
        for name, value in answer["slots"].items():
            slots[name] = one_or_more if isinstance(value, list) else slots.get(name, text)
    intents = sorted({answer["intent"] for answer in answers})
    of_slots = {"type": "object", "properties": slots, "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"intent": {"enum": intents}, "slots": of_slots},
        "required": ["intent", "slots"],
        "additionalProperties": False,
    }


def counts(
    texts: Iterable[str], references: Iterable[Answer], schema: Mapping[str, Any]
) -> dict[str, int]:
    """Return how many texts are valid, and how many have the intent of their reference."""
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    valid = right = 0
    for text, reference in zip(texts, references, strict=True):
        try:
            answer = json.loads(text)
        except ValueError:
            continue
        valid += is_valid(answer)
        right += isinstance(answer, dict) and answer.get("intent") == reference["intent"]
    return {"valid": valid, "right": right}


def measure(train: Sequence[Record], heldout: Sequence[Record]) -> list[dict[str, Any]]:
    """Return a row for the base and the adapter, free and bound."""
    schema = schema_of([json.loads(one.answer) for one in train])
    references = [json.loads(one.answer) for one in heldout]
    messages = [[{"role": "user", "content": one.prompt}] for one in heldout]
    ways = {"free": None, "bound": StructuredOutputs(json=schema)}
    sizes: dict[str, Any] = dict.fromkeys(("max_num_seqs", "max_num_batched_tokens"), 8)
    rows: list[dict[str, Any]] = []
    with Engine(str(MODEL), {NAME: MODEL / "adapters" / NAME}, **sizes) as engine:
        for adapter in (None, NAME):
            for way, outputs in ways.items():
                sampling = Sampling(max_tokens=250, temperature=0.0, structured_outputs=outputs)
                done = [o.outputs[0] for o in engine.chat(messages, adapter, sampling)]
                row = {"model": adapter or "base", "answers": way, "requests": len(done)}
                row |= counts([choice.text for choice in done], references, schema)
                rows.append(row | {"tokens": sum(len(choice.token_ids) for choice in done)})
    return rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m bench.schema_filling", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, required=True, help="folder of intent.jsonl.gz")
    parser.add_argument("--out", type=Path, required=True, help="folder of schema_filling_cpu.json")
    args = parser.parse_args()
    parts = split(read_domain(args.data, NAME), HELDOUT_SHARE, NAME)
    about = record.about()
    rows = measure(parts.train, parts.heldout)
    record.write(args.out / "schema_filling_cpu.json", about | {"rows": rows})
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
