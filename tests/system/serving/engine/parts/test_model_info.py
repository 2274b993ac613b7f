"""Information on a loaded base model."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from lora_jax.config import QuantizationConfig
from lora_jax.models.weight_sizes import WeightSizes
from serving.api.config import EngineConfig
from serving.api.generation_config import GenerationConfig
from serving.engine.parts.model_info import log_quantised, model_info, quantization_of

MODEL = SimpleNamespace(
    model_type="llama", vocab_size=260, num_layers=2, eos_token_ids=(2,), quantization=None
)
WEIGHTS = WeightSizes(15, 40)
SIZE = SimpleNamespace(max_model_len=64, num_pages=8, page_size=4)
TOKENIZER = SimpleNamespace(eos_token_ids=(1, 2))


def info(generation: GenerationConfig):
    config = EngineConfig(model="some/model")
    dtype = jnp.dtype("bfloat16")
    return model_info(config, WEIGHTS, MODEL, SIZE, dtype, TOKENIZER, generation)


def test_sizes_are_sums_and_a_text_ends_with_any_of_the_known_tokens():
    got = info(GenerationConfig({"top_k": 3}, (7,)))
    assert (got.name, got.num_parameters, got.weight_bytes) == ("model", 15, 40)
    assert (got.end_token_ids, got.sampling_defaults) == ((1, 2, 7), {"top_k": 3})
    assert (got.kv_pages, got.page_size, got.dtype) == (8, 4, "bfloat16")


def test_defaults_are_logged_where_there_are_any(caplog):
    with caplog.at_level("INFO"):
        info(GenerationConfig())
        assert not caplog.messages
        info(GenerationConfig({"temperature": 0.6, "top_k": 3}))
    assert "defaults: temperature 0.6, top_k 3" in caplog.text


def test_an_end_token_that_is_not_in_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="eos_token_id"):
        info(GenerationConfig({}, (260,)))


def test_a_vocabulary_that_the_sampler_does_not_take_is_refused(monkeypatch):
    monkeypatch.setattr(MODEL, "vocab_size", 1 << 19)
    with pytest.raises(ValueError, match="vocabulary of 524,288 tokens; top_p is exact for up to"):
        info(GenerationConfig())


def test_quantised_weights_are_said_and_logged(caplog):
    assert info(GenerationConfig()).quantization is None
    nf4 = SimpleNamespace(quantization=QuantizationConfig("bitsandbytes", "nf4"))
    sizes = WeightSizes(3_000_000, 3_125_000, 2_000_000, 1_125_000)
    assert quantization_of(nf4, sizes) == {
        "format": "nf4",
        "method": "bitsandbytes",
        "parameters": 2_000_000,
        "bits_per_parameter": 4.5,
        "other_parameters": 1_000_000,
    }
    with caplog.at_level("INFO"):
        log_quantised(nf4, sizes)
        assert "2.0 M in nf4 (bitsandbytes), 4.50 bits each; 1.0 M others" in caplog.text
        log_quantised(nf4, WEIGHTS)
    assert "Quantised weights: none" in caplog.text
    assert "KV pages" not in caplog.text
    with caplog.at_level("INFO"):
        kept = QuantizationConfig("fp8", "fp8", kv_scales=True)
        log_quantised(SimpleNamespace(quantization=kept), sizes)
    assert "Scales of KV pages in the model's files are not used: --kv-cache-dtype" in caplog.text
