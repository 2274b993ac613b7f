import dataclasses

import pytest

from serving.api.config import EngineConfig


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": ""}, "model must be a folder"),
        ({"load_format": "pt"}, "load_format must be one of auto, safetensors, dummy, got 'pt'"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, sjf, got 'lifo'"),
        ({"gpu_memory_utilization": 1.5}, r"gpu_memory_utilization must be in \(0, 1\], got 1.5"),
        ({"dtype": "float16"}, "dtype must be one of auto, float32, bfloat16, got 'float16'"),
        ({"max_num_seqs": 0}, r"max_num_seqs must be in \[1, 1024\], got 0"),
        ({"max_num_seqs": True}, "max_num_seqs must be an integer"),
        ({"max_num_seqs": 1.5}, "max_num_seqs must be an integer"),
        (
            {"max_num_seqs": 600, "max_num_batched_tokens": 512},
            r"max_num_batched_tokens \(512\) must be at least max_num_seqs",
        ),
        ({"max_model_len": 0}, "max_model_len"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes"),
        ({"lora_memory_bytes": 1 << 60}, "lora_memory_bytes"),
        ({"adapter_wait_s": 0}, "adapter_wait_s"),
        ({"adapter_wait_s": float("nan")}, "adapter_wait_s"),
        ({"mm_processor_cache_gb": -0.5}, "mm_processor_cache_gb must be 0 to 1048576 GiB"),
        ({"kv_offloading_size": True}, "kv_offloading_size must be 0 to 1048576 GiB, got True"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching"),
        ({"max_loras": 0}, "max_loras"),
        ({"max_esft_adapters": -1}, r"max_esft_adapters must be in \[0, 4096\], got -1"),
        ({"max_esft_adapters": True}, "max_esft_adapters must be an integer"),
        ({"max_esft_experts": 0}, "max_esft_experts"),
        ({"esft_memory_bytes": 0}, "esft_memory_bytes"),
        ({"seed": 2**63}, "seed"),
        ({"override_generation_config": "top_k"}, "override_generation_config must map"),
        ({"override_generation_config": {"beams": 2}}, "override_generation_config: beams is not"),
        ({"override_generation_config": {"top_p": 2}}, r"config: top_p must be in \(0, 1\], got 2"),
    ],
)
def test_wrong_values_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{"model": "some/model", **fields})


def test_every_whole_number_has_bounds():
    config = EngineConfig(model="some/model")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, int) and not isinstance(value, bool):
            with pytest.raises(ValueError, match=field.name):
                EngineConfig(**{"model": "some/model", field.name: 1 << 80})


def test_names_and_logit_rows_follow():
    assert EngineConfig(model="some/model").model_name == "model"
    assert EngineConfig(model="some/model", served_model_name="m").model_name == "m"
    assert EngineConfig(model="m", max_num_seqs=4).max_logit_rows == 64
    assert EngineConfig(model="m", max_num_seqs=100).max_logit_rows == 100


def test_a_config_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="m").max_num_seqs = 3
