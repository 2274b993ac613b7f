"""Fixture of programs that are compiled for a GPU whole, kernels of the library included."""

import functools

import jax
import pytest
from kernels.aot.compile_gpu import KIND, plugin_is_found

from lora_jax.ops import dispatch, hopper, tuning_table


@pytest.fixture
def hopper_at_hand(monkeypatch):
    """Let dispatch choose as it does on an H200; skip without the compilers for one."""
    from cuda_backend import ffi
    from cuda_backend.toolkit import find_compilers

    if not plugin_is_found() or not find_compilers():
        pytest.skip("the CUDA plugin or nvcc is missing: make test-aot")
    ffi.library().load(dispatch.cache_folder())
    monkeypatch.setattr(ffi, "require", lambda: None)
    # The device alone: what a kernel says of dtypes and sizes holds for a described GPU, too.
    monkeypatch.setattr(hopper, "require_device", lambda op, interpret: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(tuning_table, "find", functools.partial(tuning_table.find, device=KIND))
