"""Names of PEFT's target_modules lead to modules; configs alone tell what adapters change."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.cases.config_cases import DIALECTS, hub

from lora_jax.adapters.target_modules import (
    check_open,
    modules_changed,
    modules_named,
    spelled,
)
from lora_jax.config import from_hf
from lora_jax.models.registry import model_class


def catalogue_of(model_type):
    config = from_hf(hub(model_type))
    return model_class(config.model_type).catalogue(config)


@pytest.mark.parametrize("model_type", DIALECTS)
def test_every_module_has_a_name_that_files_use(model_type):
    catalogue = catalogue_of(model_type)
    by_name = spelled(catalogue)
    assert set().union(*by_name.values()) == catalogue.modules.keys()
    for name, modules in by_name.items():
        assert modules_named([name], catalogue) == modules


@pytest.mark.parametrize(
    ("names", "modules"),
    [
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        (["self_attn.q_proj"], {"q_proj"}),
        (["gate_proj"], {"gate_proj", "experts.gate_proj"}),
        (["experts.gate_proj", "w2"], {"experts.gate_proj", "experts.down_proj"}),
        (["mlp.gate"], {"router"}),
        (["qkv_proj"], {"q_proj", "k_proj", "v_proj"}),
        (
            ["gate_up_proj"],
            {"gate_proj", "up_proj", "experts.gate_proj", "experts.up_proj"},
        ),
        (["router", "lm_head"], {"router", "lm_head"}),
    ],
)
def test_a_name_stands_for_all_paths_that_end_with_it(names, modules):
    assert modules_named(names, catalogue_of("qwen3_moe")) == modules


def test_all_are_all():
    catalogue = catalogue_of("qwen3_moe")
    for name in ("all", "all-linear"):
        assert modules_named([name], catalogue) == catalogue.modules.keys()


def test_latent_attention_has_two_modules_of_one_name():
    modules = modules_named(["kv_b_proj"], catalogue_of("deepseek_v2"))
    assert modules == {"kv_b_proj.k", "kv_b_proj.v"}


def test_a_name_of_no_module_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"'q' is no module of llama.*down_proj.*q_proj"):
        modules_named(["v_proj", "q"], catalogue_of("llama"))


def write(folder, **config):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, **config}))
    return folder


def test_configs_tell_what_adapters_change(tmp_path):
    catalogue = catalogue_of("qwen3_moe")
    plain = write(tmp_path / "a", target_modules=["q_proj"])
    experts = write(tmp_path / "b", target_modules=["mlp.experts.0.down_proj", "v_proj"])
    head = write(tmp_path / "c", target_modules=["k_proj"], modules_to_save=["score"])
    assert modules_changed([plain, head], catalogue) == {"q_proj", "k_proj"}
    assert modules_changed([experts], catalogue) == {"experts.down_proj", "v_proj"}
    stacked = ["mlp.experts.gate_up_proj"]
    fused = write(tmp_path / "e", target_modules=["q_proj"], target_parameters=stacked)
    only = write(tmp_path / "f", target_modules=None, target_parameters=["mlp.experts.down_proj"])
    both = {"q_proj", "experts.gate_proj", "experts.up_proj"}
    assert modules_changed([fused], catalogue) == both
    assert modules_changed([only], catalogue) == {"experts.down_proj"}
    esft = tmp_path / "d"
    esft.mkdir()
    (esft / "expert_cfg.json").write_text("{}")
    assert modules_changed([plain, esft], catalogue) == {"q_proj"}


def test_tensors_of_modules_that_a_config_leaves_out_count(tmp_path):
    """The adapter was served before modules had to be open."""

    def changed(name, paths, **config):
        folder = write(tmp_path / name, **config)
        zeros = np.zeros((1, 1), np.float32)
        names = [f"base_model.model.model.layers.2.{path}" for path in paths]
        tensors = {f"{name}.lora_{side}.weight": zeros for name in names for side in "AB"}
        save_file(tensors, folder / "adapter_model.safetensors")
        return modules_changed([*beside, folder], catalogue_of("qwen3_moe"))

    beside = []

    plain = {"target_modules": ["q_proj"]}
    assert changed("a", ["self_attn.v_proj", "nothing.here"], **plain) == {"q_proj", "v_proj"}
    experts = {"experts.gate_proj", "experts.up_proj", "experts.down_proj"}
    assert changed("b", ["mlp.experts.1.up_proj"], **plain) == {"q_proj", "experts.up_proj"}
    assert changed("c", ["mlp.experts"], **plain) == {"q_proj"} | experts
    stacked = {"target_parameters": ["mlp.experts.down_proj"]}
    assert changed("d", ["mlp.experts"], **plain, **stacked) == {"q_proj", "experts.down_proj"}
    nested = ["mlp.experts", "mlp.experts.base_layer"]  # as PEFT writes both parameters
    assert changed("e", nested, **plain, **stacked) == {"q_proj"} | experts
    beside.append(tmp_path / "d")  # what another adapter's config says is not said of this one
    assert changed("f", ["mlp.experts"], **plain) == {"q_proj"} | experts


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["q_proj", "w_pack"]},
        {"target_modules": ["q_proj"], "target_parameters": ["self_attn.q_proj.weight"]},
        {"target_modules": ["q_proj"], "target_parameters": ["down_proj"]},
        {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [3]},
        {"target_modules": ["q_proj"], "bias": "all"},
        {"target_modules": []},
        {"target_modules": [3]},
        {},
    ],
)
def test_a_config_that_does_not_say_it_plainly_tells_nothing(tmp_path, config):
    plain = write(tmp_path / "plain", target_modules=["q_proj"])
    other = write(tmp_path / "other", **config)
    assert modules_changed([plain, other], catalogue_of("llama")) is None
    assert modules_changed([plain, tmp_path / "none"], catalogue_of("llama")) is None


def test_closed_modules_are_known_and_refused():
    catalogue = catalogue_of("mixtral").only({"q_proj", "v_proj"})
    assert catalogue.module_names == ("q_proj", "v_proj")
    assert catalogue.opened().module_names == catalogue_of("mixtral").module_names
    check_open([("q_proj", 0), ("score", 0)], catalogue)
    with pytest.raises(ValueError, match=r"changes experts\.up_proj, router.*target_modules"):
        check_open([("q_proj", 0), ("router", 1), ("experts.up_proj", 0)], catalogue)
