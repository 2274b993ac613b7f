"""Kernels of a GPU are made ready in another thread, and nothing is done elsewhere."""

import threading
from types import SimpleNamespace

import jax
import pytest

from lora_jax.ops import dispatch
from serving.runtime.early_kernels import kernels_beside


@pytest.fixture
def loads(monkeypatch):
    """What loads the kernels, to be set; and the machine's GPU."""
    made = SimpleNamespace(load=lambda: True, capability="9.0", asked=[])

    def kernel(*name):
        made.asked.append(name)
        return lambda: made.load()

    monkeypatch.setattr(dispatch, "backend_kernel", kernel)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        jax, "devices", lambda: [SimpleNamespace(compute_capability=made.capability)]
    )
    return made


def test_they_are_loaded_beside_and_waited_for(loads):
    may, done = threading.Event(), threading.Event()

    def load():
        assert may.wait(60)
        done.set()

    loads.load = load
    with kernels_beside():
        assert not done.is_set()
        may.set()
    assert done.is_set()
    assert loads.asked == [("cuda", "load_kernels")]


def test_a_failure_is_left_to_the_steps(loads):
    def load():
        raise dispatch.Declined("no backend")

    loads.load = load
    with kernels_beside():
        pass


def test_other_devices_have_none(loads, monkeypatch):
    loads.capability = "8.0"
    with kernels_beside():
        pass
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    loads.capability = "9.0"
    with kernels_beside():
        pass
    assert loads.asked == []
