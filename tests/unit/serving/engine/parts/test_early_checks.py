"""Adapters are checked against an engine's config before its model is loaded."""

import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.registry_errors import AdapterRejected
from serving.api.config import EngineConfig
from serving.engine.parts.early_checks import (
    check_adapters,
    check_hosts_adapters,
    check_plain,
    check_primary,
    limits_of,
)


def test_the_config_s_limits_count(tmp_path):
    cases.write_adapter(tmp_path, cases.dense_tensors())
    check_adapters(EngineConfig("m"), {"sql": tmp_path})
    low = EngineConfig("m", max_lora_rank=1)
    assert limits_of(low).max_rank == 1
    with pytest.raises(AdapterRejected, match="above the limit of 1; max_lora_rank sets it"):
        check_adapters(low, {"sql": tmp_path})


def test_made_up_adapters_need_no_weights(tmp_path):
    cases.write_adapter(tmp_path, cases.dense_tensors())
    (tmp_path / "adapter_model.safetensors").unlink()
    check_adapters(EngineConfig("m", load_format="dummy"), {"sql": tmp_path})
    with pytest.raises(AdapterRejected, match="no adapter_model"):
        check_adapters(EngineConfig("m"), {"sql": tmp_path})


@pytest.mark.parametrize("brought", [{"use_dora": True}, {"trainable_token_indices": [1]}])
def test_what_brings_more_than_lora_is_refused_by_an_engine_for_lora_alone(tmp_path, brought):
    cases.write_adapter(tmp_path / "plain", cases.dense_tensors())
    cases.write_adapter(tmp_path / "more", cases.dense_tensors(), brought)
    both = {name: tmp_path / name for name in ("plain", "more")}
    check_plain(EngineConfig("m"), both, has_server=False)
    split = EngineConfig("m", tensor_parallel_size=2)
    check_plain(split, {"plain": both["plain"]}, has_server=False)
    with pytest.raises(ValueError, match=r"Adapter 'more' has .* with tensor_parallel_size 2: le"):
        check_plain(split, both, has_server=False)
    with pytest.raises(ValueError, match="with a LoRA Server, which holds plain LoRA"):
        check_plain(EngineConfig("m"), both, has_server=True)
    # The merged adapter is alone on its instance: the others serve what it cannot.
    check_plain(EngineConfig("m", merge_adapter="plain"), both, has_server=False)


def test_a_model_over_hosts_has_no_esft_adapters(tmp_path):
    check_hosts_adapters({"plain": tmp_path})
    (tmp_path / "expert_cfg.json").write_text("{}")
    with pytest.raises(ValueError, match="Adapter 'law' is an ESFT adapter, and an instance over"):
        check_hosts_adapters({"plain": tmp_path / "none", "law": tmp_path})


def test_a_merged_adapter_is_one_that_dense_maps_stand_for(tmp_path):
    cases.write_adapter(tmp_path / "dense", cases.dense_tensors())
    cases.write_adapter(tmp_path / "dora", cases.dense_tensors(), {"use_dora": True})
    experts = {
        name.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): tensor
        for name, tensor in cases.dense_tensors().items()
    }
    cases.write_adapter(tmp_path / "experts", experts)
    cases.write_adapter(tmp_path / "none", cases.dense_tensors())
    (tmp_path / "none" / "adapter_model.safetensors").write_bytes(b"{")
    given = {name: tmp_path / name for name in ("dense", "dora", "experts", "none")}
    for name in ("dense", "none", None):  # what cannot be read is left to its load
        check_primary(EngineConfig("m", merge_adapter=name), given)
    for name, why in {"dora": "more than LoRA", "experts": "experts, which"}.items():
        with pytest.raises(ValueError, match=f"{name!r} cannot be merged: it changes {why}"):
            check_primary(EngineConfig("m", merge_adapter=name), given)
    with pytest.raises(ValueError, match="merge_adapter 'x' is not among the adapters"):
        check_primary(EngineConfig("m", merge_adapter="x"), given)
