"""Options that do not work together are refused by name, from a model's config alone."""

import dataclasses

import pytest
from support.cases.config_cases import hub

from lora_jax.config import ModelConfig, QuantizationConfig, from_hf
from serving.api.config import EngineConfig
from serving.engine.parts.pairs import Beside, check_pairs

ALONE, SERVER, HOSTS = Beside(), Beside(lora_server=True), Beside(several_hosts=True)
TENANTS = Beside(lora_server=True, tenants=True)
MIXTURE = from_hf(hub("mixtral") | {"num_local_experts": 8})
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3}


def model_with(**fields) -> ModelConfig:
    return dataclasses.replace(MIXTURE, **fields)


QUANTISED = model_with(quantization=object.__new__(QuantizationConfig))
IMAGES = model_with(vision=object())


def check(fields, beside=ALONE, model=MIXTURE):
    check_pairs(EngineConfig("m", **fields), model, beside)


@pytest.mark.parametrize(
    ("fields", "beside", "words"),
    [
        ({"speculative_config": SPECULATIVE}, SERVER, "speculative_config is for engines that co"),
        (
            {"lora_dtype": "int8", "lora_merge": "auto"},
            ALONE,
            "lora_merge and merge_adapter add adapters",
        ),
        (
            {"lora_dtype": "int8", "merge_adapter": "law"},
            ALONE,
            "lora_merge and merge_adapter add adapters",
        ),
        ({"max_lora_cls_labels": 3}, SERVER, "Task heads are not served beside a LoRA Server"),
        ({"max_esft_adapters": 2}, HOSTS, "over several hosts has no max_esft_adapters: set 0"),
        ({"kv_offloading_size": 1.0}, HOSTS, "over several hosts has no kv_offloading_size: set 0"),
        ({"tensor_parallel_size": 16}, ALONE, "num_experts 8|must divide by 16"),
        ({"max_model_len": 1 << 30}, ALONE, r"1073741824, but the model has \d+ positions. Lower"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": False},
            SERVER,
            "a tensor_parallel_size that divides their number, not 2",
        ),
    ],
)
def test_a_pair_is_refused(fields, beside, words):
    with pytest.raises(ValueError, match=words):
        check(fields, beside)


@pytest.mark.parametrize(
    "fields",
    [
        {"speculative_config": SPECULATIVE},
        {"lora_dtype": "int8"},
        {"lora_target_modules": ("q_proj",)},
        {"max_lora_cls_labels": 3},
        {"enable_dora_and_bias": True},
        {"max_lora_trainable_tokens": 4},
        {"max_lora_modules_to_save": 1},
    ],
    ids=str,
)
def test_what_does_not_go_with_isolation_server_is_told_what_helps_there(fields):
    (name,) = fields
    words = f"^{name}.* does not go with isolation 'server'.* use isolation 'process'"
    with pytest.raises(ValueError, match=words) as raised:
        check(fields, TENANTS)
    assert "LoRA Server" not in str(raised.value)
    assert "instances" not in str(raised.value)


def test_isolation_server_takes_what_no_adapter_has_a_part_in():
    fields = {"kv_cache_dtype": "fp8", "kv_offloading_size": 1.0, "structured_outputs": True}
    check(fields, TENANTS)
    check({}, TENANTS, QUANTISED)


def test_each_of_them_alone_is_taken():
    for fields in (
        {"speculative_config": SPECULATIVE},
        {"lora_dtype": "int8"},
        {"max_lora_cls_labels": 3},
        {"max_esft_adapters": 2},
        {"kv_offloading_size": 1.0},
        {"tensor_parallel_size": 2},
        {"enable_dora_and_bias": True},
        {"max_lora_modules_to_save": 1},
        {"page_pool_bytes": 1 << 20},
        {"lora_merge": "auto"},
        {"merge_adapter": "law"},
    ):
        check(fields)
    for beside in (SERVER, HOSTS):
        check({"tensor_parallel_size": 2}, beside)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"kv_cache_memory_bytes": 1}, "kv_cache_memory_bytes"),
        ({"lora_memory_bytes": 1}, "lora_memory_bytes"),
        ({"kv_offloading_size": 1.0}, "kv_offloading_size"),
        ({"lora_merge": "exact"}, "lora_merge exact"),
        ({"merge_adapter": "a"}, "merge_adapter"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size 2"),
    ],
)
def test_what_a_page_pool_does_not_go_with(fields, word):
    with pytest.raises(ValueError, match=f"page_pool_bytes does not go with {word}"):
        check(fields | {"page_pool_bytes": 1 << 20})


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Beside)])
def test_what_a_page_pool_is_not_beside(field):
    with pytest.raises(ValueError, match=f"does not go with {field.replace('_', ' ')}:"):
        check({"page_pool_bytes": 1 << 20}, Beside(**{field: True}))


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        (SERVER, "takes images, which a LoRA Server does not serve yet"),
        (Beside(shared_backbone=True), "takes images, which functions do not serve yet"),
        (HOSTS, "takes images, which one process serves: start it with --nnodes 1"),
    ],
)
def test_a_model_that_takes_images_is_on_one_host_with_its_adapters(beside, words):
    with pytest.raises(ValueError, match=words):
        check({}, beside, IMAGES)
    check({}, ALONE, IMAGES)


@pytest.mark.parametrize(
    ("fields", "model", "beside", "words"),
    [
        ({}, QUANTISED, ALONE, "quantised weights would be rounded"),
        ({"tensor_parallel_size": 2}, MIXTURE, ALONE, "set tensor_parallel_size to 1, not 2"),
        ({}, MIXTURE, SERVER, "LoRA Server"),
    ],
    ids=["quantised", "split", "disaggregated"],
)
def test_what_merged_weights_do_not_go_with(fields, model, beside, words):
    for how in ({"lora_merge": "exact"}, {"lora_merge": "auto"}, {"merge_adapter": "sql"}):
        ((flag, value),) = how.items()
        with pytest.raises(ValueError, match=f"{flag} {value}.*{words}"):
            check(fields | how, beside, model)
    check(fields, beside, model)


def test_one_engine_merges_in_turn_or_for_good():
    with pytest.raises(ValueError, match="set one of them"):
        check({"lora_merge": "auto", "merge_adapter": "sql"})


@pytest.mark.parametrize(
    "wanted",
    [
        {"enable_dora_and_bias": True},
        {"max_lora_trainable_tokens": 2},
        {"max_lora_modules_to_save": 1},
    ],
)
@pytest.mark.parametrize(
    ("fields", "beside", "message"),
    [
        ({}, SERVER, "does not go with a LoRA Server"),
        ({"tensor_parallel_size": 2}, ALONE, "does not go with tensor_parallel_size 2"),
        ({"merge_adapter": "x"}, ALONE, "does not go with merge_adapter x"),
    ],
)
def test_what_adapters_that_bring_more_than_lora_do_not_go_with(wanted, fields, beside, message):
    with pytest.raises(ValueError, match=f"{next(iter(wanted))} {message}"):
        check(wanted | fields, beside)


def test_whole_heads_are_not_in_8_bits():
    with pytest.raises(ValueError, match="max_lora_modules_to_save does not go with lora_dtype in"):
        check({"max_lora_modules_to_save": 1, "lora_dtype": "int8"})
