"""A refusal names what must be equal in all processes, with the values that differ."""

import dataclasses

from support.cases import tiny_checkpoint
from support.cases.tiny_checkpoint import TinyShape

from serving.api.config import EngineConfig
from serving.runtime import about
from serving.runtime.about import about_of, difference, environment_of

MODEL = "the model (config.json, sizes and samples of its weights)"


def test_models_and_flags_are_compared_and_folders_are_not(tmp_path):
    for name, seed in (("a", 0), ("b", 0)):
        tiny_checkpoint.write_model(tmp_path / name, TinyShape(layers=1), seed=seed)
    config = EngineConfig(str(tmp_path / "a"), tensor_parallel_size=2)
    moved = dataclasses.replace(config, model=str(tmp_path / "b"), lora_dir="/elsewhere")
    # As on a node whose command names no adapters, while rank 0's does.
    moved = dataclasses.replace(moved, lora_target_modules=("auto",))
    assert about_of(moved) == about_of(config)
    other = about_of(dataclasses.replace(config, max_loras=3))
    differs = {name for name, value in about_of(config).items() if other[name] != value}
    assert differs == {"--max-loras"}
    (tmp_path / "b" / "model.safetensors").write_bytes(b"shorter")
    changed = about_of(moved)
    assert [name for name in changed if changed[name] != about_of(config)[name]] == [MODEL]


def test_other_code_of_the_same_version_is_another_version(tmp_path, monkeypatch):
    tiny_checkpoint.write_model(tmp_path / "m", TinyShape(layers=1))
    ours = about_of(EngineConfig(str(tmp_path / "m")))
    monkeypatch.setattr(about, "code_digest", lambda: "f" * 64)
    why = difference(ours, about_of(EngineConfig(str(tmp_path / "m"))), "on rank 0", "on node 1")
    assert why.startswith("version of lora-jax is '")
    assert "(code ffffffffffff)' on node 1 and '" in why


def test_other_weights_of_the_same_sizes_are_another_model(tmp_path):
    for seed, name in enumerate("ab"):
        tiny_checkpoint.write_model(tmp_path / name, TinyShape(layers=1), seed=seed)
    ours, theirs = (about_of(EngineConfig(str(tmp_path / name))) for name in "ab")
    assert ours[MODEL] != theirs[MODEL]
    large = tmp_path / "b" / "model.safetensors"
    with large.open("wb") as file:  # without a byte on the disk
        file.truncate(10 << 30)
    before = about_of(EngineConfig(str(tmp_path / "b")))
    with large.open("r+b") as file:  # a thousandth of it is another one
        file.seek(7 << 30)
        file.write(b"x" * (12 << 20))
    assert about_of(EngineConfig(str(tmp_path / "b"))) != before


def test_what_differs_is_said_with_both_values():
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 2}, "here") is None
    assert difference({"a": 1}, {"a": 2}, "on rank 0") == "a is 2 there and 1 on rank 0"
    found = difference({"a": 1}, {"a": 2}, "on rank 0", "on node 3")
    assert found == "a is 2 on node 3 and 1 on rank 0"
    assert difference({"a": 1}, {}, "here") == "a is None there and 1 here"


def test_variables_that_change_programs_are_compared():
    ours = environment_of({"XLA_FLAGS": "--xla_cpu_enable_fast_math=true", "HOME": "/a"})
    assert difference(ours, environment_of({"HOME": "/b"}), "on rank 0", "on node 1") == (
        "the variable XLA_FLAGS is '' on node 1 and '--xla_cpu_enable_fast_math=true' on rank 0"
    )
    assert environment_of({"LORA_JAX_OPS": "reference"}) != environment_of({})
