"""What must be equal on all hosts is named, and what does not go together is refused."""

import dataclasses
from types import SimpleNamespace

import pytest
from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape

from serving.api.config import EngineConfig
from serving.engine.over_hosts import about_of, check_gang, shared, teller

TWO = SimpleNamespace(size=2)


def test_models_and_flags_are_compared_and_folders_are_not(tmp_path):
    for name, seed in (("a", 0), ("b", 0)):
        tiny_checkpoint.write_model(tmp_path / name, TinyShape(layers=1), seed=seed)
    config = EngineConfig(str(tmp_path / "a"), tensor_parallel_size=2)
    moved = dataclasses.replace(config, model=str(tmp_path / "b"), lora_dir="/elsewhere")
    assert about_of(moved) == about_of(config)
    other = about_of(dataclasses.replace(config, max_loras=3))
    differs = {name for name, value in about_of(config).items() if other[name] != value}
    assert differs == {"--max-loras"}
    (tmp_path / "b" / "model.safetensors").write_bytes(b"shorter")
    changed = about_of(moved)
    assert [name for name in changed if changed[name] != about_of(config)[name]] == [
        "the model (config.json, sizes of its weights)"
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 1}, "tensor_parallel_size 1 must be a multiple of the 2 nodes"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size 3 must be a multiple of the 2 nodes"),
        ({"max_esft_adapters": 2}, "over several hosts has no max_esft_adapters: set 0"),
        ({"kv_offloading_size": 1.0}, "over several hosts has no kv_offloading_size: set 0"),
    ],
)
def test_what_does_not_go_together_is_refused(fields, message):
    config = EngineConfig("m", **{"tensor_parallel_size": 2} | fields)
    with pytest.raises(ValueError, match=message):
        check_gang(config, TWO)


def test_room_for_esft_adapters_is_left_out():
    config = EngineConfig("m", tensor_parallel_size=2)
    assert check_gang(config, TWO).max_esft_adapters == 0
    assert check_gang(config, None) is config


def test_one_process_shares_with_nobody():
    value = object()
    assert shared(None, value) is value
    assert teller(None)(value) is None
