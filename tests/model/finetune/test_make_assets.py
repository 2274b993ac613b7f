"""Shipped assets equal what the commands make: ranks, layouts, sizes, hashes."""

import hashlib
import json
import pathlib
import re

import pytest

from lora_jax.adapters import esft_format, peft_format
from lora_jax.config import from_hf
from lora_jax.finetune import make_assets
from lora_jax.finetune.documents import read_format
from lora_jax.models import model_class

ROOT = pathlib.Path(__file__).parents[3]
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
