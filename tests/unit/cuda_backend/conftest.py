"""Fixtures of the tests of CUDA calls, which are lowered here and run nowhere."""

import jaxtyping
import pytest
from support.doubles.driver_double import CUDA_OPERATIONS, Double, compile_double
from support.processes.server_process import ROOT

from cuda_backend import driver, ffi


@pytest.fixture(scope="session")
def double(tmp_path_factory) -> Double:
    """A double of the driver's library, compiled once."""
    source = ROOT / "tests" / "support" / "doubles" / "cuda_double.c"
    path = compile_double(source, tmp_path_factory.mktemp("double"))
    return Double(path, CUDA_OPERATIONS, refusal=1, no_memory=driver.OUT_OF_MEMORY)


@pytest.fixture
def on_hopper(monkeypatch):
    """Let the calls be made as if the kernels were there, of shapes that stand for arrays."""
    monkeypatch.setattr(ffi, "require", lambda: None)
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
