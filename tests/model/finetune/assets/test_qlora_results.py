"""The table of QLoRA: adapters trained over either base, measured over both."""

import json

import pytest
from support.cases.finetune_cases import (
    RECORDS,
    WIDE_CONFIG,
    make_folder,
    train_nothing,
    write_domain,
)

from lora_jax.finetune.assets import qlora_results
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.frozen_base import load_base
from lora_jax.finetune.perplexity import Measured
from lora_jax.finetune.training import Schedule


def test_the_table_names_every_pair():
    rows = {"no adapter": {"none": 10.0, "nf4": 11.0}, "rank 16 over nf4": {"none": 5, "nf4": 4.9}}
    shown = qlora_results.table({"law": rows}).splitlines()
    assert shown[2:] == [
        "| law | no adapter | 10.00 | 11.00 | +10.0% |",
        "| law | rank 16 over NF4 | 5.00 | 4.90 | -2.0% |",
    ]


def test_the_command_trains_over_either_base_and_measures_over_both(
    read_only_folder, tmp_path, monkeypatch, capsys
):
    for text in ("law", "summary"):
        words = [(f"was kostet {n} mal {n * n}", f"es ist {n:b}") for n in range(60)]
        write_domain(tmp_path, text, words)
    measured, fits = [], train_nothing(monkeypatch, qlora_results)

    class Judge:
        """Stands for the evaluator: e nats less with an adapter, one more over a rounded base."""

        def __init__(self, model, length):
            self.loss = len(measured) % 2
            measured.append(model)

        def measure(self, documents, delta=None):
            return Measured(10.0 * (2 + self.loss - (delta is not None)), 10)

    monkeypatch.setattr(qlora_results, "Evaluator", Judge)
    out = tmp_path / "results" / "out.json"
    out.parent.mkdir()
    command = ["--model", str(read_only_folder), "--data", str(tmp_path), "--out", str(out)]
    qlora_results.main([*command, "--texts", "law", "summary", "--steps", "10"])
    told = json.loads(out.read_text())
    assert told["command"].endswith("qlora_results --texts law summary --steps 10")
    assert list(told["perplexity"]) == ["law", "summary"]
    names = [f"rank {r} over {base}" for r in qlora_results.RANKS for base in ("none", "nf4")]
    for rows in told["perplexity"].values():
        assert rows == {
            "no adapter": {"none": 7.389, "nf4": 20.086},
            **{name: {"none": 2.718, "nf4": 7.389} for name in names},
        }
    assert [fit.label for fit in fits] == names * 2
    assert measured[0] is measured[2] is not measured[1]  # each base is read once
    assert "| law | rank 16 over 16 bits | 2.72 | 7.39 | +171.9% |" in capsys.readouterr().out


@pytest.mark.slow
def test_adapters_help_over_either_base(tmp_path):
    folder = make_folder(tmp_path / "tiny", scale=5.0, config=WIDE_CONFIG)
    bases = {
        name: load_base(folder, form, tmp_path)[0]
        for name, form in (("none", None), ("nf4", "nf4"))
    }
    documents = read_format(folder).documents(RECORDS, "chat")
    schedule = Schedule(steps=15, batch_rows=2, learning_rate=2e-2, warmup_steps=1)
    rows = qlora_results.measure_text(
        bases, documents, documents, ranks=(2,), schedule=schedule, length=32
    )
    assert list(rows) == ["no adapter", "rank 2 over none", "rank 2 over nf4"]
    base = rows.pop("no adapter")
    assert base["none"] != base["nf4"]
    for of in rows.values():
        assert all(of[name] < 0.9 * base[name] for name in base)
    qlora_results.write(tmp_path / "out.json", {"tiny": rows}, 15)
    assert json.loads((tmp_path / "out.json").read_text())["perplexity"]["tiny"] == rows
