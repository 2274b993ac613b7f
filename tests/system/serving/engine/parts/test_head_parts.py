"""Room for task heads: as the config says, else as the adapters need."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.cases import adapter_cases as cases
from support.cases.head_cases import write_head

from lora_jax.adapters.task_head import SCORE
from serving.api.config import EngineConfig
from serving.engine.parts.head_parts import head_labels, take_heads


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


def test_a_model_knows_of_heads_only_where_there_are_any():
    catalogue = cases.llama()
    names = catalogue.module_names
    model = SimpleNamespace(module_names=names)
    assert take_heads(model, catalogue, 16, 0) is catalogue
    assert model.module_names == names
    headed = take_heads(model, catalogue, 16, 5)
    assert headed.modules[SCORE].d_in == 16
    assert model.module_names == headed.module_names == tuple(sorted((*names, SCORE)))
