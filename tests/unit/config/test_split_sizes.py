"""Sizes that must divide among devices: those that do not are named, with what to change."""

import pytest
from support.cases.config_cases import hub

from lora_jax.config import from_hf
from lora_jax.config.split_sizes import attention_output, check_divides, expert_split

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


def config_of(model_type, **sizes):
    return from_hf(hub(model_type) | SIZES | sizes)


@pytest.mark.parametrize(
    ("config", "size", "experts", "message"),
    [
        (config_of("llama"), 4, "ep", "num_key_value_heads 2 must divide by 4"),
        (config_of("llama"), 3, "ep", "num_attention_heads 4, num_key_value_heads 2, hidden_siz"),
        (config_of("mixtral", num_local_experts=4), 3, "ep", "num_experts 4, hidden_size 32"),
        (config_of("mixtral", num_local_experts=4), 4, "tp", "or enable_expert_parallel"),
    ],
)
def test_sizes_that_do_not_divide_are_named(config, size, experts, message):
    with pytest.raises(ValueError, match=message):
        check_divides(config, size, experts)


def test_shared_experts_and_dense_layers_divide_too():
    """Beside whole experts, whose own width is not split."""
    sizes = {"n_routed_experts": 4, "moe_intermediate_size": 25, "n_shared_experts": 1}
    shared = config_of("deepseek_v2", first_k_dense_replace=0, intermediate_size=49, **sizes)
    with pytest.raises(ValueError, match=r"devices: width of the shared experts 25 must divide"):
        check_divides(shared, 2, "ep")
    dense = config_of("qwen3_moe", num_experts=4, mlp_only_layers=[1], intermediate_size=49)
    with pytest.raises(ValueError, match=r"devices: intermediate_size 49 must divide"):
        check_divides(dense, 2, "ep")


def test_a_latent_needs_no_heads_of_its_own():
    sizes = {"n_routed_experts": 4, "num_key_value_heads": 1}
    check_divides(config_of("deepseek_v2", **sizes), 4, "ep")


def test_parts_are_as_wide_as_a_device_s_kernels_want():
    wide = config_of("llama", hidden_size=256, intermediate_size=320, head_dim=64)
    check_divides(wide, 2, "ep")
    with pytest.raises(ValueError, match=r"intermediate_size 320 \(parts of 64\) must divide"):
        check_divides(wide, 2, "ep", unit=64)
    wider = config_of("llama", hidden_size=256, intermediate_size=384, head_dim=64)
    check_divides(wider, 2, "ep", unit=64)


def test_the_output_of_attention_is_whole_where_its_weight_is_small_beside_the_experts():
    sizes = {"moe_intermediate_size": 24, "num_experts": 16, "head_dim": 8}
    assert attention_output(config_of("qwen3_moe", **sizes)) == "whole"  # 32 * 32 <= 3 * 16 * 24
    assert attention_output(config_of("qwen3_moe", **sizes | {"num_experts": 8})) == "parts"
    equal = {"moe_intermediate_size": 32, "num_experts": 12, "head_dim": 9}  # 36 * 32 = 3 * 12 * 32
    assert attention_output(config_of("qwen3_moe", **equal)) == "whole"
    assert attention_output(config_of("llama")) == "parts"
    latent = {"n_routed_experts": 16, "moe_intermediate_size": 24, "v_head_dim": 8}
    assert attention_output(config_of("deepseek_v2", **latent)) == "whole"
    assert attention_output(config_of("deepseek_v2", **latent | {"v_head_dim": 64})) == "parts"


def test_experts_lie_whole_where_their_number_divides():
    mixture = config_of("mixtral", num_local_experts=4)
    assert expert_split(mixture, 2, None) == expert_split(mixture, 2, True) == "ep"
    assert expert_split(mixture, 3, None) == expert_split(mixture, 2, False) == "tp"
    with pytest.raises(ValueError, match="4 experts do not divide among 3 devices"):
        expert_split(mixture, 3, True)
    assert expert_split(config_of("llama"), 3, None) == "ep"
    with pytest.raises(ValueError, match="llama has none"):
        expert_split(config_of("llama"), 2, True)
