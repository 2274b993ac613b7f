"""Engine parts built from a folder, and errors before anything is compiled."""

import logging

import pytest
from support.cases import tiny_checkpoint
from support.cases.engine_cases import GREEDY, SHAPES, make_engine

from serving.api.config import EngineConfig
from serving.engine import parts as engine_parts
from serving.engine.parts import build_parts
from serving.steps.model_runner import ModelRunner

SHAPE = tiny_checkpoint.TinyShape(hidden=16, width=24, layers=1, max_positions=40)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts") / "tiny-model"
    tiny_checkpoint.write_model(folder, SHAPE)
    tiny_checkpoint.write_adapter(folder.parent / "sql", SHAPE, 2, seed=0)
    return folder


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def config(model, **fields):
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 4, "max_loras": 2, "max_lora_rank": 4}
    return EngineConfig(str(model), **{**small, **fields})


def test_parts_fit_the_model_and_every_one_is_logged(model, caplog):
    with caplog.at_level(logging.INFO, logger="serving"):
        parts = build_parts(config(model, dtype="bfloat16"), {"sql": str(model.parent / "sql")})
    parts.compilations.close()
    info = parts.model_info
    assert (info.name, info.dtype, info.max_model_len) == ("tiny-model", "bfloat16", 40)
    assert (info.page_size, info.kv_pages) == (16, 4 * 3)
    assert info.weight_bytes == 2 * info.num_parameters
    assert [entry.name for entry in parts.registry.entries()] == ["sql"]
    assert parts.tokenizer.eos_token_ids == (2,)
    assert not parts.loop.is_alive
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
    assert any("Compiled 3 programs for steps of up to 4 tokens" in line for line in lines)
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


@pytest.mark.slow  # ahead-of-time compiling shows the programs; this compiles them all
def test_decode_without_lora_has_its_own_programs_on_accelerators(tmp_path, monkeypatch):
    """The same tokens, whether a batch's adapters' kernels are in the program or not."""
    used = []

    class Specialized(ModelRunner):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "specialize_lora": True})

        def _run(self, table, bucket, *, lora):
            used.append((bucket, lora))
            return super()._run(table, bucket, lora=lora)

    batches = [[None] * 3, ["a1", None, "a7"], [None], ["a2"]]
    prompts = [[5, 6, 7], list(range(4, 24)), [9]]
    for name in ("usual", "own"):
        (tmp_path / name).mkdir()
    with make_engine(tmp_path / "usual", SHAPES["mixtral"]) as engine:
        want = [tokens(engine.generate(prompts[: len(b)], b, GREEDY)) for b in batches]
    monkeypatch.setattr(engine_parts, "ModelRunner", Specialized)
    with make_engine(tmp_path / "own", SHAPES["mixtral"]) as engine:
        assert set(used) == {(8, True), (8, False), (32, True)}
        for names, wanted in zip(batches, want, strict=True):
            used.clear()
            assert tokens(engine.generate(prompts[: len(names)], names, GREEDY)) == wanted
            assert any(not lora for _, lora in used) == (names.count(None) == len(names))
        assert engine.stats().compilations_after_warmup == 0
