"""Sizes that follow from adapters' files: as the config says, else as the adapters need."""

import numpy as np
import pytest
from support.cases import adapter_cases as cases
from support.cases.brought_cases import FIXTURES
from support.cases.head_cases import write_head

from serving.api.config import EngineConfig
from serving.engine.parts.needed_sizes import (
    head_labels,
    needed_sizes,
    takes_gains,
    vocabulary_room,
)

ADAPTERS = {name: FIXTURES / "qwen2" / name for name in ("plain", "dora", "bias_all")}
PLAIN = {"plain": ADAPTERS["plain"], "gone": FIXTURES / "gone"}


@pytest.fixture
def adapters(tmp_path):
    cases.write_adapter(tmp_path / "plain", cases.dense_tensors())
    write_head(tmp_path / "two", ["a", "b"], np.zeros((2, 16)))
    write_head(tmp_path / "three", ["a", "b", "c"], np.zeros((3, 16)))
    write_head(tmp_path / "bad", ["a", "a"], np.zeros((2, 16)))
    return {path.name: path for path in tmp_path.iterdir()} | {"gone": tmp_path / "gone"}


def test_labels_come_from_the_config_or_the_adapters(adapters):
    asked = EngineConfig("m", max_lora_cls_labels=7)
    off, default = EngineConfig("m", max_lora_cls_labels=0), EngineConfig("m")
    assert head_labels(asked, adapters, False) == 7
    assert head_labels(off, adapters, False) == 0
    assert head_labels(default, adapters, False) == 3
    assert head_labels(default, {"plain": adapters["plain"]}, False) == 0
    assert head_labels(default, adapters, True) == 0
    assert head_labels(asked, {}, True) == 0


def test_gains_come_from_the_config_or_the_adapters():
    on, off = (EngineConfig("m", enable_dora_and_bias=wanted) for wanted in (True, False))
    default = EngineConfig("m")
    assert takes_gains(on, {}, False)
    assert not takes_gains(off, ADAPTERS, False)
    assert not takes_gains(default, PLAIN, False)
    for name in ("dora", "bias_all"):
        assert takes_gains(default, {name: ADAPTERS[name]}, False)
    assert not takes_gains(default, ADAPTERS, True)  # its load says what a server needs


def test_room_for_rows_of_the_vocabulary_is_as_asked_or_as_the_adapters_need():
    found = {name: FIXTURES / "qwen2" / name for name in ("tokens", "saved", "saved_tied")}
    default = EngineConfig("m")
    assert vocabulary_room(default, found, False) == (3, 2)
    assert vocabulary_room(default, found, True) == (0, 0)  # its load says that there is no room
    assert vocabulary_room(default, ADAPTERS, False) == (0, 0)
    sizes = {"max_lora_trainable_tokens": 7, "max_lora_modules_to_save": 0}
    assert vocabulary_room(EngineConfig("m", **sizes), found, False) == (7, 0)
    in_8_bits = EngineConfig("m", lora_dtype="int8")
    assert vocabulary_room(in_8_bits, found, False) == (3, 0)


def test_sizes_with_which_an_engine_without_the_adapters_has_the_same_programs(tmp_path):
    default = EngineConfig("m")
    assert needed_sizes(default, PLAIN) == {}
    write_head(tmp_path / "head", ["a", "b"], np.zeros((2, 16)))
    brings = {"head": tmp_path / "head", "dora": ADAPTERS["dora"]}
    brings["tokens"] = FIXTURES / "qwen2" / "tokens"
    needed = needed_sizes(default, brings)
    assert needed["max_lora_cls_labels"] == 2
    assert needed["enable_dora_and_bias"] is True
    assert needed["max_lora_trainable_tokens"] > 0
    assert needed_sizes(EngineConfig("m", **needed), brings).keys().isdisjoint(needed)
