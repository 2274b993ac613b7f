"""The bytes of adapters, against counting matrices and the paper's own capacities."""

import pytest

from lora_jax.config import from_hf
from lora_jax.placement.shape import AdapterShape, adapter_shape, expert_lora_bytes


def qwen3_moe(**changes) -> dict:
    return {
        "model_type": "qwen3_moe",
        "vocab_size": 64,
        "hidden_size": 24,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0],
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        **changes,
    }


def test_bytes_are_those_of_the_six_matrices():
    hidden, inner, rank = 24, 16, 3
    matrices = 2 * [(rank, hidden), (inner, rank)] + [(rank, inner), (hidden, rank)]
    assert expert_lora_bytes(hidden, inner, rank, 2) == 2 * sum(a * b for a, b in matrices)


def test_mixtral_adapters_fill_two_devices_as_in_section_6_4():
    """104 adapters of rank 64 on two devices of 96 GB: 1.81 GB each leave room for about two."""
    shape = AdapterShape(104, 32, 8, expert_lora_bytes(4096, 14336, 64, 2))
    assert 104 <= 2 * 96e9 / shape.adapter_bytes < 107


def test_only_layers_with_experts_count():
    got = adapter_shape(from_hf(qwen3_moe()), adapters=7, rank=4, itemsize=2)
    assert got == AdapterShape(7, 4, 6, 3 * 4 * (24 + 16) * 2)
    assert got.adapter_bytes == 4 * 6 * got.unit_bytes


def test_a_model_without_experts_is_refused():
    config = from_hf(qwen3_moe(mlp_only_layers=list(range(5))))
    if config.moe is not None:
        assert config.moe.layers == ()
    with pytest.raises(ValueError, match=r"mixture-of-experts|layers must be"):
        adapter_shape(config, 1, 1, 2)


@pytest.mark.parametrize("field", ["adapters", "layers", "experts", "unit_bytes"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one_are_refused(field, value):
    sizes = {"adapters": 1, "layers": 1, "experts": 1, "unit_bytes": 1, field: value}
    with pytest.raises(ValueError, match=field):
        AdapterShape(**sizes)
