"""The shipped table is that of the shipped files; woven is merged to the last bit."""

import json
import pathlib

import pytest
from finetune_cases import RECORDS, make_esft, make_folder

from lora_jax.finetune import esft_results, make_assets
from lora_jax.finetune.records import write_jsonl

ASSET = pathlib.Path(__file__).parents[2] / "assets" / "tiny-moe"


def test_the_command_adds_a_row_per_adapter_and_keeps_other_entries(tmp_path):
    folder = make_folder(tmp_path / "tiny", scale=5.0)
    make_esft(folder, "token-x", {0: (3, 1)}, 0)
    make_esft(folder, "gate-y", {0: (0,), 1: (1,)}, 1)
    (folder / "RESULTS.json").write_text('{"heldout": 1, "esft": 2}')
    (tmp_path / "texts").mkdir()
    for name in "xy":
        write_jsonl(tmp_path / "texts" / f"{name}.jsonl", RECORDS)
    esft_results.main([str(folder), "--heldout", str(tmp_path / "texts"), "--length", "32"])
    written = json.loads((folder / "RESULTS.json").read_text())
    assert written["heldout"] == 1
    rows = written["esft"]["adapters"]
    assert {name: row["experts"] for name, row in rows.items()} == {
        "gate-y": {"0": 1, "1": 1},
        "token-x": {"0": 2},
    }
    for row in rows.values():
        perplexity = row["text"]["perplexity"]
        assert perplexity["merged"] == perplexity["woven"]
        assert perplexity["merged"] != pytest.approx(perplexity["base"], rel=1e-3)
        assert row["woven_minus_merged_nats"] == 0.0
        assert row["bytes"] == 2 * 3 * 32 * 20 * 2  # two experts of bfloat16 each
        assert row["answer"]["tokens"] < row["text"]["tokens"]


def test_an_adapter_for_a_text_that_is_not_held_out_is_refused():
    with pytest.raises(ValueError, match="gate-z is for text 'z', held out are x, y"):
        esft_results.text_of("gate-z", {"x": RECORDS, "y": RECORDS})


def test_each_shipped_adapter_beats_the_base_by_a_fifth_and_woven_is_merged(shared_data):
    splits = make_assets.read_splits(shared_data / "esft" / "eval")
    heldout = {name: part.heldout for name, part in splits.items()}
    measured = esft_results.measure_esft(ASSET, heldout)
    written = json.loads((ASSET / "RESULTS.json").read_text())["esft"]["adapters"]
    assert set(measured) == set(written) == set(make_assets.ESFT_PLANS)
    for name, found in measured.items():
        assert found["woven"] == found["merged"], name
        assert found["merged"].text.perplexity < 0.8 * found["base"].text.perplexity, name
        for kind in ("text", "answer"):
            row = written[name][kind]
            for column in esft_results.COLUMNS:
                value = getattr(found[column], kind)
                assert value.tokens == row["tokens"]
                assert value.perplexity == pytest.approx(row["perplexity"][column], rel=0.01)
