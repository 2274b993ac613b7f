"""Sequences and tokens of a step where none are asked for."""

import pytest

from serving.api.config import EngineConfig
from serving.api.device_sizes import for_device

H200, H100, A10 = 112 << 30, 60 << 30, 18 << 30  # what JAX may use of them
CPU, ALONE = {"on_cpu": True, "device_bytes": None}, {"on_cpu": False, "alone": True}


def sizes(config, **device):
    made = for_device(config, **device)
    return made.max_num_seqs, made.max_num_batched_tokens


def test_an_accelerator_has_more_than_a_cpu():
    config = EngineConfig("model")
    assert sizes(config, **CPU, alone=True) == (32, 512)
    assert sizes(config, device_bytes=H200, **ALONE) == (256, 8192)
    assert sizes(config, device_bytes=H100, **ALONE) == (256, 8192)
    assert sizes(config, device_bytes=A10, **ALONE) == (256, 2048)
    assert sizes(config, device_bytes=None, **ALONE) == (256, 2048)


def test_without_kernels_a_cpu_has_fewer_programs_unless_a_size_is_given():
    portable = CPU | {"portable": True}
    assert sizes(EngineConfig("model"), **portable, alone=True) == (32, 32)
    assert sizes(EngineConfig("model", max_num_seqs=48), **portable, alone=True) == (48, 48)
    given = EngineConfig("model", max_num_batched_tokens=512)
    assert sizes(given, **portable, alone=True) == (32, 512)
    assert sizes(EngineConfig("model"), **portable, alone=False) == (32, 512)


def test_beside_others_the_sizes_are_a_cpus():
    """A LoRA Server is started with the size of a message, by a process without the device."""
    config = EngineConfig("model")
    assert sizes(config, on_cpu=False, device_bytes=H200, alone=False) == (32, 512)
    split = EngineConfig("model", tensor_parallel_size=2)
    assert sizes(split, device_bytes=H200, **ALONE) == (256, 512)
    assert (config.step_seqs, config.step_tokens, config.max_logit_rows) == (32, 512, 64)


def test_a_step_in_which_sequences_decode_is_shorter_unless_its_size_is_given():
    def mixed(device=ALONE, has_experts=False, **given):
        config = EngineConfig("model", **given)
        made = for_device(config, **{"device_bytes": H200} | device, has_experts=has_experts)
        return made.mixed_step_tokens

    assert (mixed(), mixed(has_experts=True)) == (512, 2048)
    assert mixed(max_num_seqs=1024) == 1024
    assert mixed(max_num_batched_tokens=4096) is None
    assert mixed(max_num_batched_tokens=4096, mixed_step_tokens=300) == 300
    assert mixed(CPU | {"alone": True}) is None
    assert mixed({"on_cpu": False, "alone": False}) is None
    few = EngineConfig("model", mixed_step_tokens=5)
    assert sizes(few, **CPU, alone=True) == (5, 512)
    assert sizes(few, device_bytes=H200, **ALONE) == (5, 8192)


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_h200"),
    [
        ({"max_num_seqs": 4}, (4, 512), (4, 8192)),
        ({"max_num_seqs": 1024}, (1024, 1024), (1024, 8192)),
        ({"max_num_batched_tokens": 16}, (16, 16), (16, 16)),
        ({"max_num_batched_tokens": 4096}, (32, 4096), (256, 4096)),
        ({"max_num_seqs": 7, "max_num_batched_tokens": 9}, (7, 9), (7, 9)),
    ],
)
def test_what_is_asked_for_stays(given, on_cpu, on_h200):
    config = EngineConfig("model", **given)
    assert sizes(config, **CPU, alone=True) == on_cpu
    assert sizes(config, device_bytes=H200, **ALONE) == on_h200


def test_fewer_tokens_than_sequences_are_refused():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\) must be at least"):
        EngineConfig("model", max_num_seqs=4, max_num_batched_tokens=3)
