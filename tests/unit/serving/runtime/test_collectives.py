"""Bounds on NCCL in the processes of a split model."""

import os
import subprocess
import sys

import pytest

from serving.runtime import collectives
from serving.runtime.collectives import bound_collectives

BOUND = "--xla_gpu_nccl_termination_timeout_seconds=60"


@pytest.fixture
def before_jax(monkeypatch):
    monkeypatch.setattr(collectives.xla_bridge, "backends_are_initialized", lambda: False)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"XLA_FLAGS": BOUND, "NCCL_NVLS_ENABLE": "0"}),
        ({"XLA_FLAGS": "--xla_a=1"}, {"XLA_FLAGS": f"--xla_a=1 {BOUND}", "NCCL_NVLS_ENABLE": "0"}),
        (
            {"XLA_FLAGS": BOUND.replace("60", "5"), "NCCL_NVLS_ENABLE": "1"},
            {"XLA_FLAGS": BOUND.replace("60", "5"), "NCCL_NVLS_ENABLE": "1"},
        ),
    ],
    ids=["nothing is set", "another flag is set", "both are set"],
)
def test_what_the_user_has_set_stays(before_jax, given, wanted):
    bound_collectives(given)
    assert given == wanted


def test_nothing_is_changed_once_jax_has_its_devices(monkeypatch):
    monkeypatch.setattr(collectives.xla_bridge, "backends_are_initialized", lambda: True)
    bound_collectives(environ := {})
    assert environ == {}


def test_a_split_sets_them_before_jax_looks_for_devices():
    """XLA ends a process with a flag that it does not know."""
    code = (
        "import os; from serving.api.config import EngineConfig;"
        "from serving.engine.parts.devices import split_of;"
        "split_of(EngineConfig('assets/tiny-moe', tensor_parallel_size=2));"
        "print(os.environ['XLA_FLAGS'], os.environ['NCCL_NVLS_ENABLE'])"
    )
    unset = ("XLA_FLAGS", "NCCL_NVLS_ENABLE")
    environ = {name: text for name, text in os.environ.items() if name not in unset}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.stdout == f"{BOUND} 0\n", done.stderr
