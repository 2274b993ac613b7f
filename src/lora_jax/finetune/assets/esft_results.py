"""Measures a base, its merged ESFT adapters and the same adapters in one served model ("woven").

    python -m lora_jax.finetune.assets.esft_results assets/tiny-moe --heldout DIR

FOLDER is a checkpoint with FOLDER/esft/NAME, NAME ending in the name of a text (token-intent) or of
a part of one (`esft_text.PARTS`); DIR has a NAME.jsonl for each text. After Table 3 of ExpertWeave
(arXiv 2508.17624): the woven model holds all adapters at once and must say what each merged
checkpoint says. Writes the entry "esft" of FOLDER/RESULTS.json.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from lora_jax.adapters.formats import esft_format
from lora_jax.adapters.weights import ExpertWeights
from lora_jax.finetune.assets.results import LENGTH, read_heldout, update_results
from lora_jax.finetune.assets.served import ServedEvaluator
from lora_jax.finetune.documents import Document, read_format
from lora_jax.finetune.esft_export import merge_checkpoint
from lora_jax.finetune.esft_text import decision_of, with_parts
from lora_jax.finetune.multi_esft import MultiEsftModel
from lora_jax.finetune.perplexity import Measured
from lora_jax.finetune.records import Record
from lora_jax.models import load
from lora_jax.nn.decoder import AbstractCausalLM
from lora_jax.typing import Int

COMMAND = "python -m lora_jax.finetune.assets.esft_results"
COLUMNS = ("base", "merged", "woven")


@dataclasses.dataclass(frozen=True)
class Text:
    """One held-out text as documents, and these cut behind what their answers decide first."""

    documents: Sequence[Document]
    decisions: Sequence[Document]


@dataclasses.dataclass(frozen=True)
class Column:
    """Results of one model on one text.

    `accuracy` is the share of answer tokens that were the most likely, `decided` that of answers
    whose first decision greedy decoding gives; None where the text has none.
    """

    text: Measured
    answer: Measured
    accuracy: float
    decided: float | None


def measure_esft(
    folder: pathlib.Path, heldout: Mapping[str, Sequence[Record]], *, length: int = LENGTH
) -> dict[str, dict[str, Column]]:
    """Return, by adapter, the measures of COLUMNS on the adapter's own held-out text, in float32.

    Raises ValueError naming an adapter whose text is not held out.
    """
    model, config = load(folder, dtype="float32")
    catalogue, heldout = model.catalogue(config), with_parts(heldout)
    paths = sorted((folder / "esft").iterdir())
    adapters = {path.name: esft_format.read(path, catalogue) for path in paths}
    named = {name: text_of(name, heldout) for name in adapters}
    texts = {text: read_text(folder, text, heldout[text]) for text in dict.fromkeys(named.values())}
    base = ServedEvaluator(model, length)
    plain = {name: measure(base, text) for name, text in tqdm(texts.items(), desc="base")}
    measured = {name: {"base": plain[text]} for name, text in named.items()}
    for name, text in tqdm(named.items(), desc="merged"):
        evaluator = base.with_weights_of(merged(folder, name))
        measured[name]["merged"] = measure(evaluator, texts[text])
    own_texts = {name: texts[text] for name, text in named.items()}
    for name, column in measure_woven(folder, adapters, own_texts, length).items():
        measured[name]["woven"] = column
    return measured


def read_text(folder: pathlib.Path, name: str, records: Sequence[Record]) -> Text:
    """Return a text as a model folder writes it, in chat form where it has a template."""
    form, decision = read_format(folder), decision_of(name)
    documents = form.documents(records, "chat" if form.template else "plain")
    return Text(documents, [form.until(d, decision) for d in documents] if decision else [])


def measure(
    evaluator: ServedEvaluator,
    text: Text,
    esft_slot: int = -1,
    reroute_tables: Int[np.ndarray, "moe_layers esft_slots experts"] | None = None,
) -> Column:
    """Return what a model, or with tables the adapter in a slot, makes of a text."""
    result = evaluator.measure(text.documents, esft_slot, reroute_tables)
    decided = None
    if text.decisions:
        first = evaluator.measure(text.decisions, esft_slot, reroute_tables)
        decided = first.exact / first.answers
    return Column(result.text, result.answer, result.right / result.answer.tokens, decided)


def text_of(name: str, heldout: Mapping[str, Sequence[Record]]) -> str:
    """Return the text that an adapter is for: what its name ends in."""
    text = name.rpartition("-")[2]
    if text not in heldout:
        raise ValueError(f"{name} is for text {text!r}, held out are {', '.join(heldout)}")
    return text


def merged(folder: pathlib.Path, name: str) -> AbstractCausalLM:
    """Return the model of the checkpoint with an adapter's experts in place of the base's."""
    with tempfile.TemporaryDirectory() as target:
        merge_checkpoint(folder, folder / "esft" / name, pathlib.Path(target))
        return load(pathlib.Path(target), dtype="float32")[0]


def measure_woven(
    folder: pathlib.Path,
    adapters: Mapping[str, ExpertWeights],
    texts: Mapping[str, Text],
    length: int,
) -> dict[str, Column]:
    """Return, by adapter, the measures of one model with all adapters in it on their own texts."""
    model, _ = load(folder, dtype="float32")
    multi_esft = MultiEsftModel(model, list(adapters.values()))
    evaluator = ServedEvaluator(model, length)
    try:
        return {
            name: measure(evaluator, texts[name], slot, multi_esft.reroute_tables)
            for slot, name in enumerate(tqdm(adapters, desc="woven"))
        }
    finally:
        multi_esft.close()


def table(folder: pathlib.Path, measured: Mapping[str, Mapping[str, Column]]) -> Any:
    """Return the rows of the table by adapter: its experts and bytes, and what was measured.

    `woven_minus_merged_nats` is the difference of the sums over the whole text.
    """
    model, config = load(folder, dtype="float32")
    rows = {}
    for name, columns in measured.items():
        adapter = esft_format.read(folder / "esft" / name, model.catalogue(config))
        row: dict[str, Any] = {
            "experts": {str(layer): len(e) for layer, e in adapter.experts.items()},
            "bytes": adapter.report.weight_bytes,
        }
        for kind in ("text", "answer"):
            measures = {column: getattr(columns[column], kind) for column in COLUMNS}
            row[kind] = {
                "tokens": measures["base"].tokens,
                "perplexity": {c: round(m.perplexity, 3) for c, m in measures.items()},
            }
        row["answer"]["accuracy"] = {c: round(m.accuracy, 4) for c, m in columns.items()}
        decided = {c: round(m.decided, 4) for c, m in columns.items() if m.decided is not None}
        if decided:
            row["answer"]["decided"] = decided
        row["woven_minus_merged_nats"] = columns["woven"].text.nats - columns["merged"].text.nats
        rows[name] = row
    return rows


def write_results(
    folder: pathlib.Path, heldout: Mapping[str, Sequence[Record]], length: int = LENGTH
) -> None:
    """Measure every adapter and write the entry "esft" of FOLDER/RESULTS.json."""
    rows = table(folder, measure_esft(folder, heldout, length=length))
    entry = {
        "command": f"{COMMAND} FOLDER --heldout DIR --length N",
        "length": length,
        "adapters": rows,
    }
    update_results(folder, {"esft": entry})
    print(json.dumps({name: row["text"]["perplexity"] for name, row in rows.items()}, indent=2))


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--heldout", type=pathlib.Path, required=True, help="NAME.jsonl files")
    parser.add_argument("--length", type=int, default=LENGTH, help="maximum tokens of context")
    args = parser.parse_args(argv)
    write_results(args.folder, read_heldout(args.heldout), args.length)


if __name__ == "__main__":
    main(sys.argv[1:])
