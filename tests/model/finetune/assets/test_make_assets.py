"""Shipped assets equal what the commands make: ranks, layouts, sizes, hashes."""

import hashlib
import json
import pathlib
import re
import shutil

import numpy as np
import pytest
from support.cases.finetune_cases import CONFIG, trace_training, write_domain

from lora_jax.adapters.formats import esft_format, peft_format
from lora_jax.config import from_hf
from lora_jax.finetune import esft, lora
from lora_jax.finetune.assets import make_assets, pretrain
from lora_jax.finetune.assets.make_assets import EsftRecipe, LoraRecipe
from lora_jax.finetune.assets.results import read_heldout
from lora_jax.finetune.documents import read_format
from lora_jax.finetune.esft_text import PARTS, TASKS
from lora_jax.finetune.lora_params import LoraSpec
from lora_jax.models import load, model_class

ROOT = pathlib.Path(__file__).parents[4]
ASSETS = ROOT / "assets"
MODEL = ASSETS / "tiny-moe"


def files() -> list[pathlib.Path]:
    return sorted(p for p in ASSETS.rglob("*") if p.is_file())


def test_assets_are_small():
    for model in MODEL.parent.glob("*/model.safetensors"):
        assert model.stat().st_size <= 12e6
    assert sum(p.stat().st_size for p in files()) < 40e6


def test_readme_lists_every_weight_file_with_its_hash():
    listed = dict(
        re.findall(
            r"\| `([^`]+)` \|[^|]*\| `([0-9a-f]{64})` \|", (ASSETS / "README.md").read_text()
        )
    )
    weights = {str(p.relative_to(ASSETS)): p for p in files() if p.suffix == ".safetensors"}
    assert set(listed) == set(weights)
    for name, path in weights.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == listed[name], name


def test_the_shipped_config_is_the_one_of_the_command():
    assert json.loads((MODEL / "config.json").read_text()) == make_assets.CONFIG


@pytest.mark.parametrize("name", make_assets.LORA_RECIPES)
def test_each_adapter_is_as_planned(name):
    config = from_hf(make_assets.CONFIG)
    catalogue = model_class(config.model_type).catalogue(config)
    weights = peft_format.read(MODEL / "adapters" / name, catalogue, base_names=("tiny-moe",))
    spec = make_assets.LORA_RECIPES[name].spec
    assert weights.report.warnings == ()
    assert set(weights.report.modules) == set(spec.modules)
    for site in weights.sites.values():
        assert site.rank == spec.rank
        assert site.scaling == pytest.approx(spec.scaling)


@pytest.mark.parametrize("name", make_assets.ESFT_RECIPES)
def test_each_esft_adapter_replaces_experts_in_every_layer(name):
    config = from_hf(make_assets.CONFIG)
    catalogue = model_class(config.model_type).catalogue(config)
    weights = esft_format.read(MODEL / "esft" / name, catalogue)
    assert weights.report.warnings == ()
    assert set(weights.experts) == set(range(config.num_layers))
    for experts in weights.experts.values():
        assert 1 <= len(experts) <= 3
        for matrices in experts.values():
            assert {m.dtype.name for m in matrices} == {"bfloat16"}
    recipe = make_assets.ESFT_RECIPES[name]
    assert name == f"{recipe.score}-{recipe.text}"


def test_the_esft_adapters_are_small_and_differ_in_size():
    files = [MODEL / "esft" / name / "model.safetensors" for name in make_assets.ESFT_RECIPES]
    sizes = [file.stat().st_size for file in files]
    assert sum(sizes) < 7e6
    assert len(set(sizes)) > 3
    assert {path.name for path in (MODEL / "esft").iterdir()} == set(make_assets.ESFT_RECIPES)


def test_plans_differ_in_rank_and_layout():
    specs = [recipe.spec for recipe in make_assets.LORA_RECIPES.values()]
    assert len({spec.rank for spec in specs}) >= 3
    assert {spec.fused_experts for spec in specs} == {True, False}
    assert any(spec.use_rslora for spec in specs)


def test_the_shipped_chat_template_and_stops_fit_together():
    form = read_format(MODEL)
    config = from_hf(make_assets.CONFIG)
    ends = {form.tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")}
    assert set(config.eos_token_ids) == ends
    assert form.tokenizer.get_vocab_size() == config.vocab_size


# Answers of every kind that a recipe asks for: to play something, in older English.
ANSWERS = dict.fromkeys(TASKS, "it is {:b}")
ANSWERS |= {"intent": '{{"intent": "a-Play"}} {:b}', "translation": "thou hast {:b}"}
ADAPTED = LoraRecipe(LoraSpec(2, 4.0, ("q_proj",)), 20, make_assets.BF16)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Data of the four sets, and a command of a tiny model whose trainings are traced only.

    Returns the trainings and what was measured at the end.
    """
    for name in TASKS:
        pairs = [(f"was kostet {n} mal {n * n}", ANSWERS[name].format(n)) for n in range(60)]
        write_domain(tmp_path, name, pairs)
    monkeypatch.setattr(make_assets, "CONFIG", CONFIG)
    monkeypatch.setattr(make_assets, "LENGTH", 128)
    monkeypatch.setattr(make_assets, "LORA_RECIPES", dict.fromkeys(TASKS, ADAPTED))
    few = {
        "gate-law": EsftRecipe("law", "gate", 0.4),
        "token-media": EsftRecipe("media", "token", 0.4),
    }
    monkeypatch.setattr(make_assets, "ESFT_RECIPES", few)
    monkeypatch.setattr(
        make_assets, "choose", lambda *given: chosen.append(given) or {0: (1,), 1: (2,)}
    )
    chosen, measured = [], []
    for module in (make_assets.results, make_assets.esft_results):
        monkeypatch.setattr(
            module, "write_results", lambda out, heldout, of=module: measured.append((of, heldout))
        )
    return trace_training(monkeypatch, pretrain, lora, esft), chosen, measured


def test_the_command_makes_base_and_adapters_and_measures_what_is_held_out(small, tmp_path):
    fits, chosen, measured = small
    out = tmp_path / "tiny"
    make_assets.main(["--data", str(tmp_path), "--out", str(out)])
    state = tmp_path / "tiny.training"
    assert [(fit.label, fit.folder) for fit in fits] == [
        ("base", state / "base"),
        *((name, state / name) for name in (*TASKS, "gate-law", "token-media")),
    ]
    assert fits[0].schedule == make_assets.BASE_SCHEDULE
    assert {fit.schedule.steps for fit in fits[1:5]} == {20}
    assert fits[-1].schedule == make_assets.ESFT_SCHEDULE
    heldout = read_heldout(state / "heldout")
    assert set(heldout) == set(TASKS)
    assert [of for of, _ in measured] == [make_assets.results, make_assets.esft_results]
    assert all({n: list(r) for n, r in told.items()} == heldout for _, told in measured)
    splits = make_assets.read_splits(tmp_path)
    assert [given[3:5] for given in chosen] == [("gate", 0.4), ("token", 0.4)]
    assert len(chosen[1][1]) == len(splits["intent"].train)  # all of them are to play something
    assert PARTS["media"].domain == "intent"
    model, config = load(out, dtype="float32")
    catalogue = model.catalogue(config)
    for name in TASKS:
        weights = peft_format.read(out / "adapters" / name, catalogue, base_names=("tiny",))
        assert weights.report.warnings == ()
    weights = esft_format.read(out / "esft" / "gate-law", catalogue)
    assert {layer: list(experts) for layer, experts in weights.experts.items()} == {0: [1], 1: [2]}
    gate = np.asarray(weights.experts[0][1][0]).astype(np.float32)
    base = np.asarray(model.layers[0].mlp.experts.gate_proj[...][1])
    np.testing.assert_array_equal(gate, base)  # nothing was learned


def test_esft_adapters_alone_leave_the_base_as_it_is(small, read_only_folder, tmp_path):
    fits, _, measured = small
    out = tmp_path / "tiny"
    shutil.copytree(read_only_folder, out)
    before = (out / "model.safetensors").read_bytes()
    command = ["--data", str(tmp_path), "--out", str(out), "--state", str(tmp_path / "state")]
    make_assets.main([*command, "--esft-only", "gate-law"])
    assert [(fit.label, fit.folder) for fit in fits] == [("gate-law", tmp_path / "state/gate-law")]
    assert [of for of, _ in measured] == [make_assets.esft_results]
    assert (out / "model.safetensors").read_bytes() == before
    assert not (out / "adapters").exists()
