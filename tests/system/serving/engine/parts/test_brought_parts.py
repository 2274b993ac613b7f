"""Room for what adapters bring: as the config says, else as the adapters need."""

import numpy as np
from support.cases import adapter_cases
from support.cases.brought_cases import FIXTURES
from support.cases.head_cases import write_head

from serving.api.config import EngineConfig
from serving.engine.parts.brought_parts import (
    needed_sizes,
    take_brought,
    takes_gains,
    vocabulary_room,
)

ADAPTERS = {name: FIXTURES / "qwen2" / name for name in ("plain", "dora", "bias_all")}
PLAIN = {"plain": ADAPTERS["plain"], "gone": FIXTURES / "gone"}


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


def test_without_room_the_catalogue_stays():
    kept = object()
    config = EngineConfig("m")
    assert take_brought(None, kept, config, PLAIN, has_server=False) == (kept, None)


def test_an_engine_for_plain_lora_alone_says_so_in_the_catalogue():
    split = EngineConfig("m", tensor_parallel_size=2)
    kept, norms = take_brought(None, adapter_cases.llama(), split, PLAIN, has_server=False)
    assert (kept.only_lora, norms) == ("tensor_parallel_size 2", None)


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
