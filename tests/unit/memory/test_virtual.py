"""The contract itself: what it derives, and that host policy needs no jax."""

import subprocess
import sys

import pytest
from support.doubles.faulty_memory import counting_memory

from lora_jax.memory.virtual import AbstractVirtualMemory, Access, MappingError, OutOfPages

POLICY = ("virtual", "ledger", "driver", "pool", "retirement")


def test_policy_runs_without_jax():
    names = ", ".join(POLICY)
    code = f"import sys; from lora_jax.memory import {names}; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'jax'" not in done.stdout


def test_errors_are_of_the_kinds_that_callers_know():
    assert issubclass(OutOfPages, MemoryError)
    assert issubclass(MappingError, ValueError)


def test_the_contract_is_not_a_memory():
    with pytest.raises(TypeError, match="abstract"):
        AbstractVirtualMemory()  # pyright: ignore[reportAbstractUsage]


def test_map_is_a_run_of_one():
    memory, calls = counting_memory(64)
    address, handle = memory.reserve(64), memory.create_page(64)
    memory.map(address, handle, 64)
    assert calls == [("map", address, 0, 64), ("grant", address, 64, Access.READ_WRITE)]
