"""The engine's parts for a model with a tower, and the pairs that are refused at its start."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases.tiny_qwen3_vl import ROPE, VISION
from support.drivers.model_driver import random_model
from support.drivers.vision_driver import IMAGE, QWEN_TEXT

from lora_jax.config import ModelConfig
from serving.api.config import EngineConfig
from serving.engine.parts.image_parts import (
    DEFAULT_ROWS,
    check_image_files,
    make_front,
    take_tower,
)
from serving.steps.model_runner import ModelRunner
from serving.steps.runner_parts import ProgramChoice, StepModel
from serving.steps.step import TABLE_ROWS, StepSizes
from serving.steps.step_programs import Program

RAW = {
    "model_type": "qwen3_vl",
    "text_config": {**QWEN_TEXT, "rms_norm_eps": 1e-6, "rope_parameters": ROPE},
    "vision_config": VISION,
    "image_token_id": IMAGE,
}
FLOAT = jnp.dtype(jnp.float32)


class Words:
    """A tokenizer that knows one token."""

    def __init__(self, spelling: str):
        self.spelling = spelling

    def token_strs(self, ids: list[int]) -> list[str]:
        return [self.spelling for _ in ids]


def config(tmp_path, **fields) -> EngineConfig:
    return EngineConfig(model=str(tmp_path), **fields)


def test_the_tower_is_taken_off_and_sizes_follow_the_context(tmp_path):
    model, made = random_model(RAW)
    parts = take_tower(config(tmp_path), model, made, FLOAT)
    assert not hasattr(model, "tower")
    assert parts.num_rows == made.max_positions < DEFAULT_ROWS
    assert parts.cache_bytes == parts.num_rows * 3 * 32 * 4
    model, made = random_model(RAW)
    parts = take_tower(config(tmp_path, encoder_cache_tokens=9), model, made, FLOAT)
    assert parts.num_rows == 9


def test_without_images_no_tower_stays(tmp_path):
    model, made = random_model(RAW)
    assert take_tower(config(tmp_path, language_model_only=True), model, made, FLOAT) is None
    assert not hasattr(model, "tower")
    plain = dataclasses.replace(made, vision=None)
    assert take_tower(config(tmp_path), model, plain, FLOAT) is None


def test_settings_and_the_placeholder_are_checked_without_a_tower(tmp_path):
    _, made = random_model(RAW)
    words, kwargs = Words("<image>"), {"mm_processor_kwargs": {"max_pixels": 9}}
    check_image_files(config(tmp_path), made, words)
    with pytest.raises(ValueError, match=f"no token {IMAGE}, which stands for images"):
        check_image_files(config(tmp_path), made, Words(""))
    check_image_files(config(tmp_path, language_model_only=True), made, Words(""))
    with pytest.raises(ValueError, match="bounds are"):
        check_image_files(config(tmp_path, **kwargs), made, words)
    plain = dataclasses.replace(made, vision=None)
    with pytest.raises(ValueError, match="takes text only"):
        check_image_files(config(tmp_path, **kwargs), plain, words)


def lowered(model, made: ModelConfig) -> str:
    """The program of a step of eight tokens."""
    sizes = StepSizes(
        max_seqs=2, max_len=16, page_size=4, num_pages=8, max_logit_rows=2, max_rank=1
    )
    of_model = StepModel(model, model.kv_shape(made), made.vocab_size, FLOAT)
    runner = ModelRunner(of_model, sizes, ProgramChoice(8))
    table = np.zeros((TABLE_ROWS, 2), np.int32)
    step = runner._step.trace(runner._operands(Program(8)), table, 8, lora=True)
    return step.lower().as_text()


def test_without_images_the_program_is_that_of_the_text_model(tmp_path):
    """And so is that of every text model: what images add is not in it."""
    model, made = random_model(RAW)
    take_tower(config(tmp_path, language_model_only=True), model, made, FLOAT)
    rope = {name: value for name, value in ROPE.items() if not name.startswith("mrope")}
    text = {**QWEN_TEXT, "rms_norm_eps": 1e-6, "rope_parameters": rope}
    plain, of_text = random_model({"model_type": "qwen3", **text})
    assert lowered(model, made) == lowered(plain, of_text)


def test_the_front_needs_the_tokenizer_s_placeholder(tmp_path):
    model, made = random_model(RAW)
    here = config(tmp_path, limit_mm_per_prompt={"image": 3})
    parts = take_tower(here, model, made, FLOAT)
    front = make_front(here, parts, made, Words("<image>"), 20)
    assert (front.placeholder, front.max_images, front.token_id) == ("<image>", 3, IMAGE)
    with pytest.raises(ValueError, match="no token 61"):
        make_front(here, parts, made, Words(""), 20)
