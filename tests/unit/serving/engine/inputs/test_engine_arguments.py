"""Arguments of Engine: fields of its configuration, others named."""

from pathlib import Path

import pytest

from serving.api.config import EngineConfig
from serving.engine.inputs.engine_arguments import adapters_of, config_of


def test_fields_of_the_configuration():
    assert config_of(Path("m"), {"max_loras": 3}) == EngineConfig("m", max_loras=3)


def test_all_other_arguments_are_named_with_the_page_about_them():
    with pytest.raises(TypeError) as error:
        config_of("m", {"enable_lora": True, "max_loras": 3, "max_lorass": 4})
    said = str(error.value)
    assert "no argument 'enable_lora', 'max_lorass' (did you mean 'max_loras'?)." in said
    assert "docs/how-to/from-vllm-llm.md" in said


def test_adapters_are_folders_by_name():
    assert adapters_of(None) == {}
    assert adapters_of({"sql": "a", "law": Path("b")}) == {"sql": "a", "law": Path("b")}
    for wrong in (["sql"], "sql", {"sql": None}, {1: "a"}):
        with pytest.raises(TypeError, match=r"a dict of folders by name, .*, not .*"):
            adapters_of(wrong)
