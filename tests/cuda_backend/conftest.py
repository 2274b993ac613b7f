"""What the tests of emulated kernels share."""

import pytest
from cuda_emulator import compile_library


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The CUDA kernels, compiled for this CPU."""
    return compile_library(tmp_path_factory.mktemp("emulated"))
