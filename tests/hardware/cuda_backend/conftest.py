"""CUDA kernels that the tests call by name, past the dispatch that would register them."""

import jax
import pytest

from cuda_backend import ffi


@pytest.fixture(autouse=True, scope="session")
def kernels() -> None:
    """Register the kernels with XLA where there is a GPU."""
    if jax.default_backend() == "gpu":
        ffi.require()
