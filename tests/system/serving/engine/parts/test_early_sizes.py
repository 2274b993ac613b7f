"""Names and bytes that no model could meet are refused before its weights are read."""

import pytest
from support.cases import tiny_esft

from lora_jax.models.loader import read_config
from serving.api.config import EngineConfig
from serving.engine.parts import early_sizes, loaded_base, parts
from serving.engine.parts.early_sizes import check_sizes


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes") / "base"
    tiny_esft.write_moe(folder, "qwen3_moe")
    return folder


REFUSED = {
    "'nonsense' is no module of qwen3_moe": {"lora_target_modules": ("q_proj", "nonsense")},
    "One KV page of 16 tokens takes": {"kv_cache_memory_bytes": 1000},
    "A sequence of max_model_len 96 takes": {"kv_cache_memory_bytes": 20_000, "max_model_len": 96},
    "the host has": {"kv_offloading_size": 1 << 20},
    "One adapter of rank 64 on every module takes": {"lora_memory_bytes": 1000},
}


@pytest.mark.parametrize("words", REFUSED)
def test_it_is_refused_before_the_weights_are_read(base, words, monkeypatch):
    def read(*arguments):
        raise AssertionError("the weights are read")

    monkeypatch.setattr(loaded_base, "load_model", read)
    with pytest.raises(ValueError, match=words):
        parts.build_parts(EngineConfig(str(base), **REFUSED[words]), {})
    with pytest.raises(AssertionError, match="weights are read"):
        parts.build_parts(EngineConfig(str(base)), {})


def test_what_lies_elsewhere_or_is_not_known_is_left_to_the_load(base):
    model = read_config(base)
    little = EngineConfig(str(base), lora_memory_bytes=1000)
    check_sizes(little, model, {}, None, alone=False)  # a LoRA Server has the experts' part
    chosen = {"lora_target_modules": ("q_proj",), "max_lora_rank": 1, "lora_memory_bytes": 2000}
    check_sizes(EngineConfig(str(base), **chosen), model, {}, None, alone=True)
    pooled = EngineConfig(str(base), lora_memory_bytes=1000, page_pool_bytes=1 << 20)
    check_sizes(pooled, model, {}, None, alone=True)


def test_what_kernels_of_a_pool_on_a_gpu_do_not_read_is_refused(base, monkeypatch):
    model = read_config(base)
    pooled = EngineConfig(str(base), page_pool_bytes=1 << 30)
    check_sizes(pooled, model, {}, None, alone=True)
    monkeypatch.setattr(early_sizes.jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="dtype float32, but bfloat16; heads of 8"):
        check_sizes(pooled, model, {}, None, alone=True)


def test_adapters_that_do_not_fit_are_refused_before_the_weights_are_read(
    base, tmp_path, monkeypatch
):
    def read(*arguments):
        raise AssertionError("the weights are read")

    monkeypatch.setattr(loaded_base, "load_model", read)
    tiny_esft.write_lora_adapter(tmp_path / "fits", "qwen3_moe", 2, 0)
    tiny_esft.write_lora_adapter(tmp_path / "wide", "qwen3_moe", 2, 0, hidden=64)
    tiny_esft.write_lora_adapter(tmp_path / "other", "deepseek_v2", 2, 0)
    config = EngineConfig(str(base))
    with pytest.raises(AssertionError, match="weights are read"):
        parts.build_parts(config, {"fits": tmp_path / "fits"})
    for name, words in {"wide": "64", "other": "the base model .*has no"}.items():
        given = {"fits": tmp_path / "fits", name: tmp_path / name}
        with pytest.raises(ValueError, match=f"'{name}': adapter_model.safetensors: .*{words}"):
            parts.build_parts(config, given)
    few = {"lora_target_modules": ("experts.down_proj",)}
    with pytest.raises(ValueError, match=r"'fits': the adapter changes .* for which this engine"):
        parts.build_parts(EngineConfig(str(base), **few), {"fits": tmp_path / "fits"})
    small = EngineConfig(str(base), max_adapter_bytes=100)
    with pytest.raises(ValueError, match=r"'fits': adapter_model.safetensors has \d+ bytes, at mo"):
        parts.build_parts(small, {"fits": tmp_path / "fits"})
