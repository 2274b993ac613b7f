"""The table of QLoRA: adapters trained over either base, measured over both."""

import json

import pytest
from support.cases.finetune_cases import RECORDS, WIDE_CONFIG, make_folder

from lora_jax.finetune import qlora_results
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.frozen_base import load_base
from lora_jax.finetune.training import Schedule


def test_the_table_names_every_pair():
    rows = {"no adapter": {"none": 10.0, "nf4": 11.0}, "rank 16 over nf4": {"none": 5, "nf4": 4.9}}
    shown = qlora_results.table({"law": rows}).splitlines()
    assert shown[2:] == [
        "| law | no adapter | 10.00 | 11.00 | +10.0% |",
        "| law | rank 16 over NF4 | 5.00 | 4.90 | -2.0% |",
    ]


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
