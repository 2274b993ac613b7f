"""Fixtures of the Ascend backend's tests."""

import sys

import pytest


@pytest.fixture
def torch_npu(monkeypatch):
    """torch_npu and vllm-ascend as this process finds them: the double."""
    # Every worker reads this file, and one alone runs these tests: torch takes 2 s to import.
    from support.doubles.torch_npu_double import TorchNpuDouble

    double = TorchNpuDouble()
    for name, module in double.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield double
    double.close()
