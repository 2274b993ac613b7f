"""Measures a folder of a base model with adapters on held-out text, and writes it down.

    python -m lora_jax.finetune.assets.results assets/tiny-moe --heldout DIR

FOLDER is a checkpoint with FOLDER/adapters/NAME; DIR has a NAME.jsonl for each (make_assets leaves
it beside its checkpoints). What is measured is what is served. Writes FOLDER/RESULTS.json.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from lora_jax.adapters.formats import peft_format
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.lora_params import LoraDelta, loaded_delta
from lora_jax.finetune.perplexity import Evaluator
from lora_jax.finetune.records import Record, read_jsonl
from lora_jax.models import load

BASE = "base"
LENGTH = 512


def measure_folder(
    folder: pathlib.Path,
    heldout: Mapping[str, Sequence[Record]],
    *,
    length: int = LENGTH,
    own_only: bool = False,
    kinds: tuple[str, ...] = ("text", "answer"),
) -> dict[str, Any]:
    """Return perplexities of base and adapters on each held-out text, by the text's name.

    Text is in chat form where the model has a chat template, else plain.
    "text" counts every token but the first, "answer" those after the prompt. With `own_only`,
    only the base and the adapter of the text's own name are measured.
    """
    model, config = load(folder, dtype="float32")
    catalogue, evaluator = model.catalogue(config), Evaluator(model, length)
    form = read_format(folder)
    style = "chat" if form.template else "plain"
    adapters: dict[str, LoraDelta | None] = {BASE: None}
    for path in sorted((folder / "adapters").iterdir()):
        adapters[path.name] = loaded_delta(peft_format.read(path, catalogue))
    results: dict[str, Any] = {}
    for text, records in tqdm(heldout.items(), desc="held-out"):
        documents = form.documents(records, style)
        entry: dict[str, Any] = {"records": len(records)}
        for kind in kinds:
            names = [n for n in adapters if not own_only or n in (BASE, text)]
            measured = {
                n: evaluator.measure(documents, adapters[n], answer_only=kind == "answer")
                for n in names
            }
            entry[kind] = {
                "tokens": measured[BASE].tokens,
                "perplexity": {n: round(m.perplexity, 3) for n, m in measured.items()},
            }
        results[text] = entry
    return results


def gain(entry: dict[str, Any], name: str) -> float:
    """Return by which share an adapter's perplexity lies below the base's."""
    return 1.0 - entry["perplexity"][name] / entry["perplexity"][BASE]


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m lora_jax.finetune.assets.results")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--heldout", type=pathlib.Path, required=True, help="NAME.jsonl files")
    parser.add_argument("--length", type=int, default=LENGTH, help="maximum tokens of context")
    args = parser.parse_args(argv)
    write_results(args.folder, read_heldout(args.heldout), args.length)


def read_heldout(folder: pathlib.Path) -> dict[str, list[Record]]:
    """Return the records of every NAME.jsonl of a folder, by name."""
    return {path.stem: read_jsonl(path) for path in sorted(folder.glob("*.jsonl"))}


def write_results(
    folder: pathlib.Path, heldout: Mapping[str, Sequence[Record]], length: int = LENGTH
) -> None:
    """Measure everything on everything and write FOLDER/RESULTS.json."""
    measured = measure_folder(folder, heldout, length=length)
    gains = {
        kind: {n: round(gain(e[kind], n), 4) for n, e in measured.items() if n in adapters_of(e)}
        for kind in ("text", "answer")
    }
    results = {
        "command": "python -m lora_jax.finetune.assets.results FOLDER --heldout DIR --length N",
        "length": length,
        "lower_perplexity_than_base_on_own_text": gains,
        "heldout": measured,
    }
    update_results(folder, results)
    print(json.dumps(gains, indent=2))


def update_results(folder: pathlib.Path, entries: Mapping[str, Any]) -> None:
    """Write entries into FOLDER/RESULTS.json; those that others wrote there stay."""
    file = folder / "RESULTS.json"
    old = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(old | dict(entries), indent=2) + "\n", encoding="utf-8")


def adapters_of(entry: dict[str, Any]) -> list[str]:
    """Return the names of the adapters that a text was measured with."""
    return [name for name in entry["text"]["perplexity"] if name != BASE]


if __name__ == "__main__":
    main(sys.argv[1:])
