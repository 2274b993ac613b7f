"""The share of a GPU that JAX takes: more, where nothing of an engine lies outside of it."""

from types import SimpleNamespace

import pytest

from bench.parallel.shapes import LLAMA_8B, QWEN3_30B
from lora_jax.config import from_hf
from serving.api.config import EngineConfig
from serving.engine.memory import jax_share
from serving.engine.memory.jax_share import expert_bytes, take_share

DENSE, EXPERTS = from_hf(LLAMA_8B), from_hf(QWEN3_30B)
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 141 GiB whose client is still to come; `share` is what was chosen."""
    gpu = SimpleNamespace(share=None, total=141 * GIB)
    for name in jax_share._SAID:
        monkeypatch.delenv(name, raising=False)

    def choose(share):
        gpu.share = share
        return True

    def usage():
        return SimpleNamespace(device_used=GIB, device_free=gpu.total - GIB)

    monkeypatch.setattr(jax_share.xla_memory, "can_choose", lambda: True)
    monkeypatch.setattr(jax_share.xla_memory, "choose_share", choose)
    monkeypatch.setattr(jax_share, "for_platform", lambda name: SimpleNamespace(usage=usage))
    return gpu


def test_a_dense_model_alone_takes_nine_tenths(gpu):
    assert take_share(EngineConfig("m"), DENSE, alone=True)
    assert gpu.share == 0.9


@pytest.mark.parametrize(
    ("fields", "alone"),
    [({}, False), ({"page_pool_bytes": GIB}, True), ({"tensor_parallel_size": 2}, True)],
)
def test_what_lies_outside_keeps_its_room(gpu, fields, alone):
    assert not take_share(EngineConfig("m", **fields), DENSE, alone=alone)
    assert gpu.share is None


@pytest.mark.parametrize("name", jax_share._SAID)
def test_the_environment_has_the_last_word(gpu, monkeypatch, name):
    monkeypatch.setenv(name, "0.5")
    assert not take_share(EngineConfig("m"), DENSE, alone=True)
    assert gpu.share is None


@pytest.mark.parametrize(
    ("gib", "fields", "chosen"),
    [
        (141, {}, 0.9),  # experts of 54 GiB do not fit into a quarter
        (288, {}, None),
        (288, {"max_esft_adapters": 0}, 0.9),
        (141, {"max_esft_adapters": 2}, None),
    ],
)
def test_experts_keep_theirs_where_they_fit(gpu, gib, fields, chosen):
    gpu.total = gib * GIB
    take_share(EngineConfig("m", **fields), EXPERTS, alone=True)
    assert gpu.share == chosen


def test_without_a_cuda_client_to_come_nothing_is_asked(gpu, monkeypatch):
    monkeypatch.setattr(jax_share.xla_memory, "can_choose", lambda: False)
    monkeypatch.setattr(jax_share, "for_platform", lambda name: pytest.fail("asked"))
    assert not take_share(EngineConfig("m"), EXPERTS, alone=True)


def test_bytes_of_experts_are_those_of_a_checkpoint():
    assert expert_bytes(DENSE) == 0
    assert expert_bytes(EXPERTS) == 48 * 128 * 3 * 2048 * 768 * 2
