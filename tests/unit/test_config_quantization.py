"""The quantization_config of every method, and those refused by name."""

import pytest
from support.cases.config_cases import hub

from lora_jax.config import QuantizationConfig, from_hf


def compressed(**weights) -> dict:
    """Return a compressed-tensors section of int4 groups with changes to its weights."""
    arguments = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights
    groups = {"group_0": {"weights": arguments, "targets": ["Linear"]}}
    form = "float-quantized" if arguments["type"] == "float" else "pack-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


FP8 = {"num_bits": 8, "type": "float", "group_size": None}
QUANTIZED = [
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        QuantizationConfig("bitsandbytes", "nf4"),
    ),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        QuantizationConfig("fp8", "fp8", block=(128, 128)),
    ),
    ({"quant_method": "fp8"}, QuantizationConfig("fp8", "fp8")),
    (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
        QuantizationConfig("gptq", "int4", 128, zero_offset=1),
    ),
    (
        {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
        QuantizationConfig("gptq", "int4", symmetric=False),
    ),
    (
        {"quant_method": "gptq", "bits": 4, "format": "gptq_v2", "desc_act": True},
        QuantizationConfig("gptq", "int4", desc_act=True),
    ),
    (
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM", "format": "gemm"},
        QuantizationConfig("awq", "int4", 64, symmetric=False),
    ),
    (compressed(), QuantizationConfig("compressed-tensors", "int4", 32)),
    (
        compressed(strategy="channel", symmetric=False, actorder="weight"),
        QuantizationConfig("compressed-tensors", "int4", symmetric=False),
    ),
    (compressed(**FP8, strategy="channel"), QuantizationConfig("compressed-tensors", "fp8")),
    (
        compressed(**FP8, strategy="block", block_structure=[128, 64]),
        QuantizationConfig("compressed-tensors", "fp8", block=(128, 64)),
    ),
]


@pytest.mark.parametrize(("section", "want"), QUANTIZED, ids=range(len(QUANTIZED)))
def test_quantization_of_every_method(section, want):
    assert from_hf(hub("llama", quantization_config=section)).quantization == want


def test_sections_of_old_and_of_outer_configs_are_read():
    """An older name of compressed-tensors, and a section that stands in text_config alone."""
    want = QuantizationConfig("compressed-tensors", "int4", 32)
    assert from_hf(hub("llama", compression_config=compressed())).quantization == want
    text = {"text_config": {"quantization_config": compressed()}}
    assert from_hf(hub("llama", **text)).quantization == want
    both = hub("llama", **text, quantization_config=compressed(group_size=64))
    assert from_hf(both).quantization == QuantizationConfig("compressed-tensors", "int4", 64)


def test_a_quantised_model_names_the_one_that_it_was_made_of():
    of = {"quantization_config": compressed(), "_name_or_path": "org/whole-7b/"}
    assert from_hf(hub("llama", **of)).original == "whole-7b"
    assert from_hf(hub("llama", _name_or_path="org/whole-7b")).original is None
    for path in ("", 3, None, "/"):
        assert from_hf(hub("llama", **of | {"_name_or_path": path})).original is None


def test_scales_of_kv_pages_are_noted():
    for section in (compressed(), {"quant_method": "fp8"}):
        for scheme, noted in (("static", True), ({"num_bits": 8}, True), (None, False)):
            config = from_hf(
                hub("llama", quantization_config=section | {"kv_cache_scheme": scheme})
            )
            assert config.quantization.kv_scales is noted


def changed(**changes) -> dict:
    return compressed() | changes


NOT_QUANTIZED = [
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit is not supported"),
    (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf3"},
        "bnb_4bit_quant_type 'nf3' is not supported, only 'nf4' or 'fp4'",
    ),
    ({"quant_method": "fp8", "activation_scheme": "block"}, "activation_scheme 'block' is not sup"),
    ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported, only 4"),
    (changed(quantization_status="calibration"), "quantization_status 'calibration' is not supp"),
    (changed(transform_config={"config_groups": {}}), "transform_config is not supported"),
    (compressed(dynamic=True), "dynamic True is not supported, only False"),
    (
        changed(
            config_groups={
                "g": compressed()["config_groups"]["group_0"] | {"output_activations": 1}
            }
        ),
        "config_groups: g: output_activations are not supported",
    ),
    (
        changed(
            config_groups={"g": compressed()["config_groups"]["group_0"] | {"format": "dense"}}
        ),
        "format 'dense' of 4 bits, type 'int' is not supported",
    ),
    ({"quant_method": "bitsandbytes"}, "read where load_in_4bit is true"),
    ({"quant_method": ["gptq"]}, "quantization_config: quant_method .'gptq'. is not supported"),
    ({"bits": 4}, "quant_method None is not supported, only awq, bitsandbytes, compressed-tensors"),
    ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "format 'gemv' is not supported"),
    ({"quant_method": "awq", "bits": 4, "checkpoint_format": "gemv_fast"}, "checkpoint_format 'ge"),
    ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "backend 'llm-awq' is not suppor"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported"),
    ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format True is"),
    (compressed(**FP8, strategy="block"), "config lacks block_structure"),
    (
        compressed(type="float", group_size=16) | {"format": "mxfp4-pack-quantized"},
        "group_size 16 is not supported, only 32",
    ),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is .128., not two"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "not two positive integers"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported, only 'e4m3'"),
    ({"quant_method": "gptq", "bits": 8}, "bits 8 is not supported, only 4"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 33}, "group_size 33 is odd"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0, not a positive"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported"),
    (compressed(actorder="group"), "actorder 'group' is not supported, only None or 'weight'"),
    (compressed(num_bits=8), "format 'pack-quantized' of 8 bits, type 'int' is not supported"),
    (compressed(strategy="tensor"), "strategy 'tensor' is not supported, only 'group' or 'chan"),
    (changed(sparsity_config={"format": "sparse-24"}), "format 'sparse-24' is not supported"),
    (changed(config_groups={}), "config_groups must be of one format, got none"),
    (
        changed(
            config_groups=compressed()["config_groups"]
            | {"group_1": compressed(group_size=64)["config_groups"]["group_0"]}
        ),
        "config_groups must be of one format, got Quant",
    ),
]


@pytest.mark.parametrize(("section", "message"), NOT_QUANTIZED, ids=[m for _, m in NOT_QUANTIZED])
def test_quantization_that_is_refused_by_name(section, message):
    with pytest.raises(ValueError, match=message):
        from_hf(hub("llama", quantization_config=section))
