"""A folder's files say which kind of adapter it is."""

import pytest
from support.cases import adapter_cases as cases
from support.cases import tiny_esft

from lora_jax.adapters import reader
from lora_jax.models import model_class
from lora_jax.models.loader import read_config


def test_the_kind_is_told_by_the_config_file(tmp_path):
    base = tiny_esft.write_moe(tmp_path / "base", "qwen3_moe")
    config = read_config(base)
    catalogue = model_class(config.model_type).catalogue(config)
    tiny_esft.write_esft_adapter(tmp_path / "esft", base, {0: (1,)}, 1)
    assert reader.read(tmp_path / "esft", catalogue).report.kind == "esft"
    (tmp_path / "esft" / "task_head.json").write_text("{}")
    with pytest.raises(ValueError, match=r"task_head\.json would be lost"):
        reader.read(tmp_path / "esft", catalogue)
    cases.write_adapter(tmp_path / "lora", cases.dense_tensors())
    assert reader.read(tmp_path / "lora", cases.llama()).report.kind == "lora"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        reader.read(tmp_path / "empty", catalogue)


def test_names_and_configs_are_checked_without_the_weights(tmp_path):
    base = tiny_esft.write_moe(tmp_path / "base", "qwen3_moe")
    tiny_esft.write_esft_adapter(tmp_path / "esft", base, {0: (1,)}, 1)
    cases.write_adapter(tmp_path / "lora", cases.dense_tensors())
    for kind in ("esft", "lora"):
        reader.check(tmp_path / kind)
        for file in (tmp_path / kind).glob("*.safetensors"):
            file.write_bytes(b"no weights")
        reader.check(tmp_path / kind)
    with pytest.raises(ValueError, match=r"rank 2 is above the limit of 1; max_lora_rank sets it"):
        reader.check(tmp_path / "lora", reader.AdapterReadLimits(max_rank=1))
    (tmp_path / "lora" / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        reader.check(tmp_path / "lora")
    (tmp_path / "esft" / "expert_cfg.json").write_text("[]")
    with pytest.raises(ValueError, match=r"expert_cfg\.json"):
        reader.check(tmp_path / "esft")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        reader.check(tmp_path / "empty")


def test_limits_and_root_reach_both_readers(tmp_path):
    base = tiny_esft.write_moe(tmp_path / "base", "qwen3_moe")
    config = read_config(base)
    catalogue = model_class(config.model_type).catalogue(config)
    root = tmp_path / "root"
    tiny_esft.write_esft_adapter(tmp_path / "esft", base, {0: (1,)}, 1)
    cases.write_adapter(root / "lora", cases.dense_tensors())
    with pytest.raises(ValueError, match="leads outside"):
        reader.read(tmp_path / "esft", catalogue, root=root)
    with pytest.raises(ValueError, match="at most"):
        reader.read(
            tmp_path / "esft", catalogue, limits=reader.AdapterReadLimits(max_file_bytes=64)
        )
    with pytest.raises(ValueError, match="limit of 1"):
        reader.read(
            root / "lora", cases.llama(), limits=reader.AdapterReadLimits(max_rank=1), root=root
        )
