"""Adapters are checked against an engine's config before its model is loaded."""

import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.registry_errors import AdapterRejected
from serving.api.config import EngineConfig
from serving.engine.parts.early_checks import check_adapters, limits_of


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
