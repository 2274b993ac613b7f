"""Fixtures of the emulated kernels' tests."""

import pytest
from support.doubles.cuda_emulator import compile_library


@pytest.fixture(scope="module")
def library(request, tmp_path_factory):
    """The CUDA kernels that a test file's DRIVER calls, compiled for this CPU."""
    return compile_library(tmp_path_factory.mktemp("emulated"), request.module.DRIVER)
