"""The shipped table is that of the shipped files; woven is merged to the last bit."""

import json
import pathlib

import numpy as np
import pytest
from support.cases.finetune_cases import RECORDS, make_esft, make_folder, num_learned

from lora_jax.finetune.assets import esft_results, make_assets
from lora_jax.finetune.assets.served import ServedEvaluator, TextAndAnswer
from lora_jax.finetune.esft_text import PARTS, part_of, with_parts
from lora_jax.finetune.perplexity import Measured
from lora_jax.finetune.records import write_jsonl
from lora_jax.models import load

DECIDING = {"gate-intent", "token-intent", "token-media"}
ASSET = pathlib.Path(__file__).parents[4] / "assets" / "tiny-moe"


class WeightsJudge(ServedEvaluator):
    """Stands for the evaluator: nats a token are a sum over the experts that a text would use."""

    def __init__(self, model, length):
        self.model, self.length = model, length

    def with_weights_of(self, model):
        return WeightsJudge(model, self.length)

    def measure(self, documents, esft_slot=-1, reroute_tables=None):
        nats = 0.0
        for place, layer in enumerate(self.model.layers):
            gates = np.abs(np.asarray(layer.mlp.experts.gate_proj[...]))
            table = range(4) if reroute_tables is None else reroute_tables[place, esft_slot]
            nats += sum((n + 1) * float(gates[expert].mean()) for n, expert in enumerate(table))
        tokens, answers = (num_learned(documents, only) for only in (False, True))
        found = Measured(nats * tokens, tokens), Measured(nats * answers, answers)
        return TextAndAnswer(*found, int(nats * 100) % answers, len(documents), 0)


def test_the_command_adds_a_row_per_adapter_and_keeps_other_entries(tmp_path, monkeypatch):
    """Models are measured in the tests of shipped adapters below; here their weights are."""
    monkeypatch.setattr(esft_results, "ServedEvaluator", WeightsJudge)
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
        share = row["answer"]["accuracy"]
        assert set(share) == {"base", "merged", "woven"}
        assert 0 <= share["merged"] == share["woven"] <= 1
        assert "decided" not in row["answer"]


def test_an_adapter_for_a_text_that_is_not_held_out_is_refused():
    with pytest.raises(ValueError, match="gate-z is for text 'z', held out are x, y"):
        esft_results.text_of("gate-z", {"x": RECORDS, "y": RECORDS})


@pytest.fixture(scope="module")
def heldout(real_data):
    splits = make_assets.read_splits(real_data / "esft" / "eval")
    return {name: part.heldout for name, part in splits.items()}


def few(heldout):
    """Return four records of each text; half of them are of its part, where it has one."""
    chosen = {name: records[:4] for name, records in heldout.items()}
    for part in PARTS.values():
        own = part_of(heldout[part.domain], part)
        others = [record for record in heldout[part.domain] if record not in own]
        chosen[part.domain] = (*own[:2], *others[:2])
    return chosen


def check(found, written):
    """Hold measures of one adapter against its row of the table; columns may be missing."""
    for column, measures in found.items():
        for kind in ("text", "answer"):
            value, row = getattr(measures, kind), written[kind]
            assert value.tokens == row["tokens"]
            assert value.perplexity == pytest.approx(row["perplexity"][column], rel=0.01)
        assert measures.accuracy == pytest.approx(written["answer"]["accuracy"][column], abs=0.01)
        if measures.decided is not None:
            assert measures.decided == pytest.approx(written["answer"]["decided"][column], abs=0.04)


@pytest.mark.long
def test_ten_shipped_adapters_in_one_model_are_their_merged_models_and_beat_the_base(heldout):
    """On a little of each text."""
    measured = esft_results.measure_esft(ASSET, few(heldout))
    assert set(measured) == set(make_assets.ESFT_RECIPES)
    for name, found in measured.items():
        assert found["woven"] == found["merged"], name
        assert found["merged"].text.perplexity < 0.9 * found["base"].text.perplexity, name


@pytest.mark.long
def test_the_shipped_table_has_a_row_for_each_adapter_and_says_what_is_measured(heldout):
    """Measured again for two of them, whose texts are short."""
    written = json.loads((ASSET / "RESULTS.json").read_text())["esft"]["adapters"]
    assert set(written) == set(make_assets.ESFT_RECIPES)
    for row in written.values():
        assert row["woven_minus_merged_nats"] == 0.0
        assert row["text"]["perplexity"]["merged"] < 0.8 * row["text"]["perplexity"]["base"]
    assert {n for n, row in written.items() if "decided" in row["answer"]} == DECIDING
    for name in DECIDING:
        decided = written[name]["answer"]["decided"]
        assert decided["woven"] == decided["merged"] > decided["base"] + 0.1
    model, _ = load(ASSET, dtype="float32")
    base = ServedEvaluator(model, esft_results.LENGTH)
    for name in ("token-media", "gate-archaic"):
        which = name.partition("-")[2]
        text = esft_results.read_text(ASSET, which, with_parts(heldout)[which])
        merged = base.with_weights_of(esft_results.merged(ASSET, name))
        models = {"base": base, "merged": merged}
        check({c: esft_results.measure(m, text) for c, m in models.items()}, written[name])


@pytest.mark.slow
def test_the_whole_shipped_table_is_what_is_measured(heldout):
    written = json.loads((ASSET / "RESULTS.json").read_text())["esft"]["adapters"]
    for name, found in esft_results.measure_esft(ASSET, heldout).items():
        assert found["woven"] == found["merged"], name
        check(found, written[name])
