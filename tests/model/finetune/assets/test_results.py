"""The shipped perplexities are those of the shipped files, and each adapter earns its place."""

import json
import pathlib

import jax
import pytest
from support.cases.finetune_cases import RECORDS, make_folder

from lora_jax.finetune.assets import make_assets, results
from lora_jax.finetune.lora_params import LoraPair, LoraSpec, init_lora
from lora_jax.finetune.peft_export import save_adapter
from lora_jax.finetune.records import write_jsonl
from lora_jax.models import load

HELDOUT = {"idle": RECORDS, "busy": RECORDS}
ASSET = pathlib.Path(__file__).parents[4] / "assets" / "tiny-moe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model with one adapter that does nothing and one that does harm or good."""
    out = make_folder(tmp_path_factory.mktemp("measured") / "tiny", scale=5.0)
    model, config = load(out, dtype="float32")
    catalogue, spec = model.catalogue(config), LoraSpec(2, 4.0, ("q_proj", "lm_head"))
    pairs = init_lora(spec, catalogue, 0)
    save_adapter(out / "adapters" / "idle", pairs, spec, catalogue, base_name="tiny")
    busy = {
        n: LoraPair(p.a, jax.random.normal(jax.random.key(1), p.b.shape)) for n, p in pairs.items()
    }
    save_adapter(out / "adapters" / "busy", busy, spec, catalogue, base_name="tiny")
    (out / "texts").mkdir()
    for name in HELDOUT:
        write_jsonl(out / "texts" / f"{name}.jsonl", RECORDS)
    return out


def test_every_adapter_is_measured_on_every_text(folder):
    results.main([str(folder), "--heldout", str(folder / "texts"), "--length", "32"])
    written = json.loads((folder / "RESULTS.json").read_text())
    assert set(written["heldout"]) == {"idle", "busy"}
    for entry in written["heldout"].values():
        perplexity = entry["text"]["perplexity"]
        assert perplexity["idle"] == pytest.approx(perplexity["base"], rel=1e-5)
        assert perplexity["busy"] != pytest.approx(perplexity["base"], rel=1e-2)
        assert entry["answer"]["tokens"] < entry["text"]["tokens"]
        assert entry["records"] == len(RECORDS)
    gains = written["lower_perplexity_than_base_on_own_text"]["text"]
    assert gains["idle"] == 0.0
    assert gains["busy"] != 0.0


@pytest.mark.long
def test_own_only_leaves_out_the_other_adapters(folder):
    measured = results.measure_folder(folder, HELDOUT, length=32, own_only=True)
    assert set(measured["busy"]["text"]["perplexity"]) == {"base", "busy"}


def test_gain_is_the_share_by_which_perplexity_falls():
    assert results.gain({"perplexity": {"base": 10.0, "a": 7.5}}, "a") == 0.25


@pytest.mark.slow
def test_each_shipped_adapter_beats_the_base_by_a_fifth_on_its_own_heldout_text(real_data):
    """On all of two texts, which must give what the table says, and on a part of the others."""
    splits = make_assets.read_splits(real_data / "esft" / "eval")
    whole = ("intent", "law")
    heldout = {n: s.heldout if n in whole else s.heldout[:8] for n, s in splits.items()}
    measured = results.measure_folder(ASSET, heldout, own_only=True, kinds=("text",))
    written = json.loads((ASSET / "RESULTS.json").read_text())["heldout"]
    assert set(measured) == set(written) == set(make_assets.LORA_RECIPES)
    for name, entry in measured.items():
        assert results.gain(entry["text"], name) >= 0.20, name
        assert results.gain(written[name]["text"], name) >= 0.20, name
    for name in whole:
        assert measured[name]["text"]["tokens"] == written[name]["text"]["tokens"]
        for who, value in measured[name]["text"]["perplexity"].items():
            assert value == pytest.approx(written[name]["text"]["perplexity"][who], rel=0.01)
