"""Adapters and KV pages in 8 bits: the dtype of their rows."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases as cases

from lora_jax.adapters.local_widths import LocalWidths
from serving.api.config import EngineConfig
from serving.engine.memory.storage import host_form, kv_dtype, lora_dtype

CODED = EngineConfig(model="m", lora_dtype="int8")
BFLOAT16 = jnp.dtype(jnp.bfloat16)


def test_pages_are_of_the_model_unless_they_are_in_8_bits():
    assert kv_dtype(EngineConfig(model="m"), BFLOAT16) == BFLOAT16
    assert kv_dtype(EngineConfig(model="m", kv_cache_dtype="fp8"), BFLOAT16) == jnp.uint8
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, fp8, got 'int8'"):
        EngineConfig(model="m", kv_cache_dtype="int8")


def test_rows_are_of_the_model_unless_they_are_in_8_bits():
    assert lora_dtype(EngineConfig(model="m"), BFLOAT16) == BFLOAT16
    assert lora_dtype(CODED, BFLOAT16) == jnp.int8
    catalogue = cases.llama()
    weights = cases.weights(catalogue, 2)
    assert host_form(EngineConfig(model="m"), catalogue, None)(weights) is weights
    coded = host_form(CODED, catalogue, LocalWidths(2, True, 8))(weights)
    assert coded.sites["q_proj", 0].b.shape == (1, 2, 2, 8 + 16)
    assert coded.sites["q_proj", 0].b.dtype == np.int8


def test_rows_that_are_copied_are_kept_as_the_device_has_them_unless_they_are_merged():
    weights = cases.weights(cases.llama(), 2)
    for changes, dtype in (({}, BFLOAT16), ({"merge_adapter": "law"}, np.float32)):
        config = EngineConfig(model="m", **changes)
        kept = host_form(config, cases.llama(), None, copied_as=BFLOAT16)(weights)
        assert kept.sites["q_proj", 0].b.dtype == dtype
