"""The device's own memory copies rows; where it is nobody's, programs write them."""

from types import SimpleNamespace

import jax
import pytest

from lora_jax.adapters.host_copier import HostCopier
from serving.runtime import device_copier as copier


@pytest.fixture
def on_gpu(monkeypatch):
    device = SimpleNamespace(platform="gpu", local_hardware_id=3)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


def test_on_a_cpu_programs_write_or_an_engine_s_thread_copies():
    assert copier.device_copier() is None
    assert isinstance(copier.engine_copier(is_pooled=False), HostCopier)
    assert copier.engine_copier(is_pooled=True) is None


def test_on_a_gpu_its_own_memory_copies(on_gpu, monkeypatch):
    monkeypatch.setattr(copier, "for_platform", lambda platform, number: (platform, number))
    assert copier.device_copier() == ("gpu", 3)
    assert copier.engine_copier(is_pooled=True) == ("gpu", 3)


def test_where_there_is_no_such_memory_programs_write(on_gpu, monkeypatch):
    def nothing(platform, number):
        raise NotImplementedError

    monkeypatch.setattr(copier, "for_platform", nothing)
    assert copier.device_copier() is None
