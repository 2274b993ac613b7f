"""Two lines, and a decorator: which base, which function, when it is loaded."""

import json

import pytest
from support.processes.server_process import ROOT

import lora_jax
from serving import Sampling
from serving.functions import app
from serving.functions.app import App, base_of

MODEL = ROOT / "assets" / "tiny-moe"


def adapter_in(folder, base):
    """Write an adapter's config alone."""
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}
    text = json.dumps(config | {"base_model_name_or_path": base})
    (folder / "adapter_config.json").write_text(text)
    return folder


def test_the_base_is_the_folder_that_the_adapter_names(tmp_path, monkeypatch):
    base = tmp_path / "models" / "tiny"
    base.mkdir(parents=True)
    (base / "config.json").write_text("{}")
    far = adapter_in(tmp_path / "far" / "a", str(base))
    monkeypatch.chdir(far)  # neither here nor above is a folder of this name
    assert base_of(far) == base
    monkeypatch.chdir(base.parent)
    assert base_of(adapter_in(tmp_path / "far" / "b", "someone/tiny")) == base
    monkeypatch.chdir(tmp_path)
    assert base_of(adapter_in(tmp_path / "models" / "b", "someone/tiny")) == base
    assert base_of(adapter_in(base / "adapters" / "c", "tiny")) == base
    assert base_of(MODEL / "adapters" / "law") == MODEL


def test_an_adapter_without_a_base_here_says_what_to_give(tmp_path):
    with pytest.raises(ValueError, match=r"'other/none', and neither that path.*give model="):
        base_of(adapter_in(tmp_path / "a", "other/none"))
    with pytest.raises(ValueError, match="names no base model: give model="):
        base_of(adapter_in(tmp_path / "b", None))
    with pytest.raises(ValueError, match="none"):
        base_of(tmp_path / "none")
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"model is no adapter: it has no adapter_config\.json"):
        base_of(tmp_path / "model")


def test_a_handler_is_given_its_function_when_it_is_called(monkeypatch):
    asked = []

    def connect(*args, **fields):
        asked.append((args, fields))
        return "the function"

    monkeypatch.setattr(app, "connect", connect)
    made = App(MODEL, max_num_seqs=2)

    @made.function("law", name="brief")
    def brief(event, model):
        """Say it briefly."""
        return event, model

    assert (brief.__doc__, asked) == ("Say it briefly.", [])
    assert brief(3) == (3, "the function")
    assert asked == [((MODEL, "law"), {"name": "brief", "max_num_seqs": 2})]
    lora_jax.function(MODEL / "adapters" / "law", max_num_seqs=4)
    args = (MODEL, MODEL / "adapters" / "law")
    assert asked[1] == (args, {"name": None, "max_num_seqs": 4})


def test_a_decorator_without_its_parentheses_is_told():
    """Else the handler would be taken for the adapter's folder at the first call."""
    made = App(MODEL)
    with pytest.raises(TypeError, match=r'write @app\.function\("path/to/adapter"\)'):

        @made.function
        def brief(event, model):
            return event


def test_other_names_of_the_package_do_not_exist():
    with pytest.raises(AttributeError, match="'lora_jax' has no attribute 'functions_'"):
        _ = lora_jax.functions_


@pytest.mark.long
def test_two_lines():
    fn = lora_jax.function(MODEL / "adapters" / "law", max_model_len=64)
    assert fn.generate("The court", Sampling(max_tokens=4, temperature=0))[0].outputs[0].text
    fn.close()
