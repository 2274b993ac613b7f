"""Fixtures of the Ascend backend's tests."""

import sys

import pytest
from support.doubles.torch_npu_double import TorchNpuDouble


@pytest.fixture
def torch_npu(monkeypatch):
    """torch_npu and vllm-ascend as this process finds them: the double."""
    double = TorchNpuDouble()
    for name, module in double.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield double
    double.close()
