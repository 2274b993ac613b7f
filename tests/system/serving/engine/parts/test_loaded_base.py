"""The base model is loaded in the dtype that is asked for, and a log line says what it is."""

import json
import logging

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.cases import tiny_checkpoint

from serving.api.config import EngineConfig
from serving.engine.parts.loaded_base import load_model
from serving.engine.parts.shared_backbone import source_of

SHAPE = tiny_checkpoint.TinyShape(hidden=16, width=24, layers=1, max_positions=40)


@pytest.mark.parametrize(("asked", "loaded"), [("auto", jnp.float32), ("bfloat16", jnp.bfloat16)])
def test_the_dtype_is_the_files_or_the_one_asked_for(tmp_path, caplog, asked, loaded):
    folder = tmp_path / "tiny-model"
    tiny_checkpoint.write_model(folder, SHAPE)
    config = EngineConfig(str(folder), dtype=asked)
    with caplog.at_level(logging.INFO, logger="serving"):
        model, model_config, dtype, _ = load_model(config, source_of(config, None), None)
    assert dtype == loaded
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model.embed))} == {jnp.dtype(loaded)}
    assert model_config.hidden_size == 16
    assert "Model tiny-model: llama, 0.0 M parameters" in caplog.text
    assert jnp.dtype(loaded).name in caplog.text
    assert str(folder) not in caplog.text
    assert "float16, which" not in caplog.text
    file = folder / "config.json"
    said = {"torch_dtype": "float16"}
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    with caplog.at_level(logging.INFO, logger="serving"):
        assert load_model(config, source_of(config, None), None)[2] == loaded
    told = "files say float16, which is computed in float32. --dtype bfloat16 halves"
    assert (told in caplog.text) == (asked == "auto")


@pytest.mark.parametrize(("backend", "level"), [("cpu", "INFO"), ("gpu", "WARNING")])
def test_float16_on_an_accelerator_is_a_warning(tmp_path, caplog, monkeypatch, backend, level):
    tiny_checkpoint.write_model(tmp_path, SHAPE)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch_dtype": "float16"}))
    config = EngineConfig(str(tmp_path))
    source = source_of(config, None)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    with caplog.at_level(logging.INFO, logger="serving"):
        load_model(config, source, None)
    (told,) = (record for record in caplog.records if "say float16" in record.getMessage())
    assert told.levelname == level
    assert ("kernels of this device" in told.getMessage()) == (backend == "gpu")
