"""CUDA kernels that the tests call by name, past the dispatch that would register them."""

import os

import jax
import pytest

from cuda_backend import ffi

# Else this process has most of the GPUs' memory, which servers that tests start need as well.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture(autouse=True, scope="session")
def kernels() -> None:
    """Register the kernels with XLA where there is a GPU."""
    if jax.default_backend() == "gpu":
        ffi.require()
