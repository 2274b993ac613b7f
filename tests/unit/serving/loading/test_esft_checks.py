"""ESFT adapters that a base model cannot have are refused before its weights are read."""

import dataclasses
import json

import pytest
from support.cases.config_cases import hub

from lora_jax.config import ModelConfig, QuantizationConfig, from_hf
from serving.api.config import EngineConfig
from serving.loading.esft_checks import QUANTISED, check_esft

MIXTURE = from_hf(hub("mixtral") | {"num_local_experts": 8})
DENSE = from_hf(hub("llama"))
CODED = dataclasses.replace(MIXTURE, quantization=object.__new__(QuantizationConfig))
EXPERT = "model.layers.0.block_sparse_moe.experts.0.w1"


@pytest.fixture
def esft(tmp_path):
    (tmp_path / "law").mkdir()
    (tmp_path / "law" / "expert_cfg.json").write_text("{}")
    return {"law": tmp_path / "law", "lora": tmp_path}


def engine(tmp_path, *tensors: str, in_files: bool = False, **fields) -> EngineConfig:
    """Return the config of an engine over a folder with tensors of these names."""
    if in_files:
        index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        header = json.dumps({key: {} for key in tensors}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return EngineConfig(str(tmp_path), **fields)


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        f"{EXPERT}.qweight",
        f"{EXPERT}.weight_packed",
        f"{EXPERT}.weight.absmax",
        f"{EXPERT}.weight_scale",
        f"{EXPERT}.weight_scale_inv",
        "model.layers.0.mlp.experts.gate_up_proj_scale_inv",
    ],
)
def test_quantised_experts_are_refused_by_their_tensors_names(tmp_path, esft, name, in_files):
    config = engine(tmp_path, name, in_files=in_files, max_esft_adapters=2)
    with pytest.raises(ValueError, match=f"max_esft_adapters is 2, but {QUANTISED}: set it to 0"):
        check_esft(config, CODED, {})
    config = engine(tmp_path, name, in_files=in_files)
    check_esft(config, CODED, {"lora": esft["lora"]})
    with pytest.raises(ValueError, match=f"'law' is an ESFT adapter, but {QUANTISED}: leave it"):
        check_esft(config, CODED, esft)


@pytest.mark.parametrize(
    "name",
    [
        f"{EXPERT}.weight",
        "model.layers.0.mlp.shared_experts.up_proj.weight_packed",
        "model.layers.0.self_attn.q_proj.qweight",
    ],
)
def test_experts_that_are_left_out_of_the_format_are_taken(tmp_path, esft, name):
    check_esft(engine(tmp_path, name, max_esft_adapters=2), CODED, esft)


def test_files_that_cannot_be_read_are_left_to_the_load(tmp_path, esft):
    config = EngineConfig(str(tmp_path), max_esft_adapters=2)
    for text in (b"", b"\xff" * 9, b"\x02" + b"\0" * 7 + b"[1"):
        (tmp_path / "model.safetensors").write_bytes(text)
        check_esft(config, CODED, esft)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    check_esft(config, CODED, esft)


def no_experts(model: ModelConfig) -> str:
    return rf"the model \({model.model_type}\) has no experts"


def test_models_without_experts_and_engines_without_room_are_told_apart(tmp_path, esft):
    config = EngineConfig(str(tmp_path), max_esft_adapters=2)
    with pytest.raises(ValueError, match=f"max_esft_adapters is 2, but {no_experts(DENSE)}"):
        check_esft(config, DENSE, {})
    with pytest.raises(ValueError, match=f"'law' is an ESFT adapter, but {no_experts(DENSE)}"):
        check_esft(dataclasses.replace(config, max_esft_adapters=None), DENSE, esft)
    closed = dataclasses.replace(config, max_esft_adapters=0)
    with pytest.raises(ValueError, match=r"'law' .* max_esft_adapters is 0, .* set another number"):
        check_esft(closed, MIXTURE, esft)
    check_esft(closed, MIXTURE, {"lora": esft["lora"]})
    check_esft(config, MIXTURE, esft)


def test_an_esft_adapter_is_not_merged(tmp_path, esft):
    merged = EngineConfig(str(tmp_path), merge_adapter="law")
    with pytest.raises(ValueError, match="merge_adapter 'law' is an ESFT adapter, and only LoRA"):
        check_esft(merged, MIXTURE, esft)
    check_esft(dataclasses.replace(merged, merge_adapter="lora"), MIXTURE, esft)
