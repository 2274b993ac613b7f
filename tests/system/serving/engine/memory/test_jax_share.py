"""The share of a GPU that JAX takes: more, where nothing of an engine lies outside of it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench.parallel.shapes import LLAMA_8B, QWEN3_30B
from lora_jax.config import from_hf
from serving.api.config import EngineConfig
from serving.engine.memory import jax_share
from serving.engine.memory.jax_share import expert_bytes, share_of, take_share

DENSE, EXPERTS = from_hf(LLAMA_8B), from_hf(QWEN3_30B)
GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 141 GiB whose client is still to come; `share` is what was chosen."""
    gpu = SimpleNamespace(share=None, total=141 * GIB, used=GIB)
    for name in jax_share._SAID:
        monkeypatch.delenv(name, raising=False)

    def devices_are_found():
        gpu.share = os.environ.get(jax_share._NAME)
        return "gpu"

    def usage():
        return SimpleNamespace(device_used=gpu.used, device_free=gpu.total - gpu.used)

    monkeypatch.setattr(jax_share.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(jax_share.jax, "default_backend", devices_are_found)
    monkeypatch.setattr(jax_share, "for_platform", lambda name: SimpleNamespace(usage=usage))
    return gpu


def test_a_dense_model_alone_takes_nine_tenths(gpu):
    assert take_share(EngineConfig("m"), DENSE, alone=True)
    assert gpu.share == str(share_of(EngineConfig("m"), DENSE, gpu.total)) == "0.9"
    assert jax_share._NAME not in os.environ


@pytest.mark.parametrize(
    ("fields", "alone"),
    [({}, False), ({"page_pool_bytes": GIB}, True), ({"tensor_parallel_size": 2}, True)],
)
def test_what_lies_outside_keeps_its_room(gpu, fields, alone):
    assert not take_share(EngineConfig("m", **fields), DENSE, alone=alone)
    assert gpu.share is None
    assert share_of(EngineConfig("m", tensor_parallel_size=2), DENSE, gpu.total) == 0.75


@pytest.mark.parametrize("name", jax_share._SAID)
def test_the_environment_has_the_last_word(gpu, monkeypatch, name):
    monkeypatch.setenv(name, "0.5")
    assert not take_share(EngineConfig("m"), DENSE, alone=True)
    assert gpu.share is None


@pytest.mark.parametrize(
    ("gib", "fields", "chosen"),
    [
        (141, {}, "0.9"),  # experts of 54 GiB do not fit into a quarter
        (288, {}, None),
        (288, {"max_esft_adapters": 0}, "0.9"),
        (141, {"max_esft_adapters": 2}, None),
    ],
)
def test_experts_keep_theirs_where_they_fit(gpu, gib, fields, chosen):
    gpu.total = gib * GIB
    take_share(EngineConfig("m", **fields), EXPERTS, alone=True)
    assert gpu.share == chosen


def test_a_neighbour_on_the_gpu_keeps_its_room(gpu):
    gpu.used = 20 * GIB
    assert not take_share(EngineConfig("m"), DENSE, alone=True)
    assert gpu.share is None


def test_a_jax_that_is_at_work_is_left_alone(gpu, monkeypatch):
    monkeypatch.setattr(jax_share.xla_bridge, "backends_are_initialized", lambda: True)
    assert not take_share(EngineConfig("m"), DENSE, alone=True)
    assert gpu.share is None


def test_jax_reads_the_share_when_it_looks_for_devices():
    """Before that no plugin of a GPU is registered; here it says what it would take."""
    script = """
from types import SimpleNamespace
from jax._src import xla_bridge
from jaxlib import xla_client
from lora_jax.config import from_hf
from serving.api.config import EngineConfig
from serving.engine.memory import jax_share
from bench.parallel.shapes import LLAMA_8B
found = xla_bridge._discover_and_register_pjrt_plugins
def plugins():
    print(xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"])
    found()
xla_bridge._discover_and_register_pjrt_plugins = plugins
usage = SimpleNamespace(device_used=0, device_free=80 << 30)
jax_share.for_platform = lambda name: SimpleNamespace(usage=lambda: usage)
jax_share.take_share(EngineConfig("m"), from_hf(LLAMA_8B), alone=True)
"""
    env = {k: v for k, v in os.environ.items() if k not in jax_share._SAID}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout == "0.9\n", done.stderr


def test_bytes_of_experts_are_those_of_a_checkpoint():
    assert expert_bytes(DENSE) == 0
    assert expert_bytes(EXPERTS) == 48 * 128 * 3 * 2048 * 768 * 2
