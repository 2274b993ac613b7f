"""Engine parts built from a folder, and errors before anything is compiled."""

import logging
import shutil

import pytest
from support.cases import tiny_checkpoint

from serving.api.config import EngineConfig
from serving.engine.parts import loaded_base
from serving.engine.parts.parts import build_parts

SHAPE = tiny_checkpoint.TinyShape(hidden=16, width=24, layers=1, max_positions=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts") / "tiny-model"
    tiny_checkpoint.write_model(folder, SHAPE)
    tiny_checkpoint.write_adapter(folder.parent / "sql", SHAPE, 2, seed=0)
    return folder


def config(model, **fields):
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 4, "max_loras": 2, "max_lora_rank": 4}
    return EngineConfig(str(model), **{**small, **fields})


def test_parts_fit_the_model_and_every_one_is_logged(model, caplog):
    with caplog.at_level(logging.INFO, logger="serving"):
        built = build_parts(config(model, dtype="bfloat16"), {"sql": str(model.parent / "sql")})
    built.compilations.close()
    info = built.model_info
    assert (info.name, info.dtype, info.max_model_len) == ("tiny-model", "bfloat16", 40)
    assert (info.page_size, info.kv_pages) == (16, 4 * 3)
    assert info.weight_bytes == 2 * info.num_parameters
    assert [entry.name for entry in built.registry.entries()] == ["sql"]
    assert built.tokenizer.eos_token_ids == (2,)
    assert not built.loop.is_alive
    lines = [record.getMessage() for record in caplog.records]
    for start in (
        "jax ",
        "Model tiny-model: llama",
        "Mesh: one",
        "KV cache: 12 pages",
        "LoRA slots: 2",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert any("Adapter sql: lora, rank 2, 7 modules" in line for line in lines)
    assert any("2 programs for steps of up to 4 tokens are ready" in line for line in lines)
    assert not any(str(model.parent) in line for line in lines)


def test_what_cannot_be_served_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        build_parts(config(tmp_path), {})
    with pytest.raises(ValueError, match="max_model_len is 41, but the model has 40"):
        build_parts(config(model, max_model_len=41), {})
    with pytest.raises(ValueError, match="the budget for adapters is 10"):
        build_parts(config(model, lora_memory_bytes=10), {})
    with pytest.raises(KeyError, match="law"):
        build_parts(config(model), {"law": str(tmp_path / "nothing")})
    path = str(model.parent / "sql")
    with pytest.raises(ValueError, match="rank"):
        build_parts(config(model, max_lora_rank=1), {"sql": path})


def test_small_files_are_checked_before_weights_are_read(model, tmp_path, monkeypatch):
    def read_too_early(*_):
        raise AssertionError("the weights were read")

    monkeypatch.setattr(loaded_base, "load_model", read_too_early)
    adapter = model.parent / "sql"
    with pytest.raises(ValueError, match="rank 2 is above the limit of 1"):
        build_parts(config(model, max_lora_rank=1), {"sql": adapter})
    with pytest.raises(ValueError, match="this model takes text only"):
        build_parts(config(model, mm_processor_kwargs={"min_pixels": 1}), {})
    folder = shutil.copytree(model, tmp_path / "m")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        build_parts(config(folder), {})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="m has no tokenizer"):
        build_parts(config(folder), {})
    with pytest.raises(AssertionError, match="the weights were read"):
        build_parts(config(model), {"sql": adapter})
