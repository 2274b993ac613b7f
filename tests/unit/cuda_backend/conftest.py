"""Fixtures of the tests of CUDA calls, which are lowered here and run nowhere."""

import jaxtyping
import pytest
from support.doubles.driver_double import Double, cuda_double

from cuda_backend import ffi


@pytest.fixture(scope="session")
def double(tmp_path_factory) -> Double:
    """A double of the driver's library, compiled once."""
    return cuda_double(tmp_path_factory.mktemp("double"))


@pytest.fixture
def on_hopper(monkeypatch):
    """Let the calls be made as if the kernels were there, of shapes that stand for arrays."""
    monkeypatch.setattr(ffi, "require", lambda: None)
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
