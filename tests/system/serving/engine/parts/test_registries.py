"""An engine's registry refuses adapters that the device cannot hold."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from safetensors.numpy import load_file, save_file
from support.cases import tiny_checkpoint
from support.cases.engine_cases import SHAPES

from lora_jax.adapters import reader
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.registry import AdapterRejected
from lora_jax.adapters.slots import size_slots
from lora_jax.config import from_hf
from lora_jax.models import model_class
from serving.api.config import EngineConfig
from serving.engine.parts.registries import load_adapters, make_registry
from serving.loading.residencies import make_residencies


@pytest.fixture
def made(tmp_path):
    shape = SHAPES["llama"]
    tiny_checkpoint.write_model(tmp_path / "model", shape)
    for name, rank in {"a": 2, "b": 3, "c": 6}.items():
        tiny_checkpoint.write_adapter(tmp_path / name, shape, rank, seed=rank)
    base = from_hf(json.loads((tmp_path / "model" / "config.json").read_text()))
    catalogue = model_class("llama").catalogue(base)
    allocator = SlotAllocator(catalogue, 2, size_slots(catalogue, 2, 6, 4).rows)

    def make(max_cpu_loras=None, **more):
        limits = {"max_lora_rank": 6, "max_cpu_loras": max_cpu_loras}
        config = EngineConfig(model=str(tmp_path / "model"), **limits)
        source = SimpleNamespace(read_adapter=reader.read)
        parts = {"catalogue": catalogue, "source": source, "remote": None, "config": base}
        residencies = make_residencies(allocator, None, None, on_loaded=lambda seconds: None)
        return make_registry(config, SimpleNamespace(**parts | more), residencies)

    make.catalogue, make.base = catalogue, base
    return make, {name: tmp_path / name for name in "abc"}


def test_sums_have_the_limits_of_the_engine(made, caplog):
    make, paths = made
    registry, compositions = make()
    caplog.set_level("INFO")
    load_adapters(registry, paths)
    assert "Adapter b: lora, rank 3" in caplog.text
    assert "Host memory" not in caplog.text
    one, two, three = (registry.get(name) for name in "abc")
    assert compositions.entry([(one, 1.0), (two, 1.0)]).report.max_rank == 5
    with pytest.raises(ValueError, match="max_lora_rank=6"):
        compositions.entry([(one, 1.0), (three, 1.0)])


def test_a_host_of_fewer_adapters_than_slots_is_said(made, caplog):
    make, _ = made
    make(max_cpu_loras=EngineConfig("m").max_loras)
    assert "max_cpu_loras" not in caplog.text
    make(max_cpu_loras=1)
    assert "max_cpu_loras is 1, max_loras 16: an adapter that leaves host" in caplog.text


def test_a_host_that_holds_few_of_the_given_adapters_says_so(made, caplog):
    make, paths = made
    registry, _ = make(max_cpu_loras=2)
    load_adapters(registry, paths)
    size = sum(known.report.weight_bytes for known in registry.known())
    (told,) = [r.getMessage() for r in caplog.records if "Host memory" in r.getMessage()]
    assert "max_total_adapter_bytes=17179869184, max_cpu_loras=2) holds 2 of the 3" in told
    assert f"All 3 take {size} bytes." in told


def test_sums_are_refused_behind_a_server_and_esft_without_room(made, tmp_path):
    make, paths = made
    registry, _ = make()
    load_adapters(registry, paths)
    remote = SimpleNamespace(keep=lambda weights: weights)
    _, compositions = make(remote=remote)
    with pytest.raises(ValueError, match="LoRA Server"):
        compositions.entry([(registry.get("a"), 1.0), (registry.get("b"), 1.0)])
    tiny_checkpoint.write_adapter(tmp_path / "wide", SHAPES["llama"], 7, seed=1)
    with pytest.raises(AdapterRejected, match="rank"):
        registry.load("wide", tmp_path / "wide", confined=False)


def test_an_adapter_of_another_precision_warns_once_in_the_log(made, caplog):
    make, paths = made
    file = paths["a"] / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"base_quantization": "nf4"})
    registry, _ = make(catalogue=dataclasses.replace(make.catalogue, quantization="none"))
    load_adapters(registry, paths)
    registry.load("again", paths["a"], confined=False)
    told = [r.getMessage() for r in caplog.records if "trained over" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(
        "Adapter in folder a: trained over a base in nf4, served over one in 16 or 32"
    )


def test_an_adapter_of_the_model_that_a_quantised_one_was_made_of_gives_no_warning(made, caplog):
    """Nor is its task head refused, which is so for heads of other models."""
    make, paths = made
    file = paths["a"] / "adapter_config.json"
    named = json.loads(file.read_text()) | {"base_model_name_or_path": "org/whole"}
    file.write_text(json.dumps(named))
    told = {}
    for original in (None, "whole"):
        caplog.clear()
        load_adapters(make(config=dataclasses.replace(make.base, original=original))[0], paths)
        told[original] = [r for r in caplog.records if "'org/whole', served on" in r.getMessage()]
    assert len(told[None]) == 1
    assert not told["whole"]
