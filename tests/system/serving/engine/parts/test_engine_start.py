"""Sizes of the device's kind, the source and the texts: known before weights are read."""

import pytest
from support.cases import tiny_checkpoint

from serving.api.config import EngineConfig
from serving.engine.parts import engine_start

SHAPE = tiny_checkpoint.TinyShape(hidden=16, width=24, layers=1, max_positions=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start") / "tiny-model"
    tiny_checkpoint.write_model(folder, SHAPE)
    (folder / "model.safetensors").write_bytes(b"never read")
    return folder


@pytest.mark.parametrize(("has_kernels", "tokens"), [(True, 512), (False, 32)])
def test_without_kernels_steps_are_short_where_no_size_is_given(
    model, has_kernels, tokens, monkeypatch
):
    monkeypatch.setattr(engine_start.cpu_kernels, "available", lambda: has_kernels)
    start = engine_start.prepare(EngineConfig(str(model)), {}, None, None, None)
    assert start.config.max_num_batched_tokens == tokens
    assert start.split is None
    assert start.tokenizer.eos_token_ids == (2,)
    assert not start.source.is_shared
