"""Which implementation of an op runs: chosen while tracing, by platform and by what is at hand.

"cuda" is the backend of that name, found by its entry point; "pallas_gpu" (Mosaic) and "pallas_tpu"
are kernels written in JAX; "ffi" is C++ on a CPU, built at first use; "xla" is portable JAX whose
cost follows the rows; "reference" states the meaning.
`LORA_JAX_OPS` names one of them for the whole process; `LORA_JAX_CACHE` is the folder of compiled
kernels; `LORA_JAX_MARCH` is the CPU that C++ kernels are compiled for, as `g++ -march` takes it. No
other module of ops reads the environment.
"""

import functools
import importlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lora_jax.typing import Array

log = logging.getLogger(__name__)

ENV = "LORA_JAX_OPS"
CACHE_ENV = "LORA_JAX_CACHE"
MARCH_ENV = "LORA_JAX_MARCH"
BACKENDS = "lora_jax.backends"  # entry points: a function that returns {op: kernel}
IMPLEMENTATIONS = ("cuda", "pallas_gpu", "pallas_tpu", "ffi", "xla", "reference")
_TRIED = {
    "cpu": ("ffi", "xla", "reference"),
    "gpu": ("cuda", "pallas_gpu", "xla", "reference"),
    "tpu": ("pallas_tpu", "xla", "reference"),
}
DTYPES = (jnp.float32, jnp.bfloat16)


def candidates(implementation: str | None = None) -> tuple[str, ...]:
    """Return names to try in order; exactly one if the caller or the environment names it.

    Raises:
        ValueError: the name is not an implementation.
    """
    name = implementation or os.environ.get(ENV)
    if name:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"implementation {name!r} is not one of {', '.join(IMPLEMENTATIONS)}")
        return (name,)
    return _TRIED.get(jax.default_backend(), ("xla", "reference"))


def backend(name: str, op: str) -> Callable:
    """Return a kernel that finds itself in a backend when it is first called.

    It declines, by NotImplementedError, where the backend is not installed or lacks the op. So a
    backend's code is imported only on machines that ask for it.
    """

    def kernel(*args, **kwargs):
        found = _backend_ops(name)
        if op not in found:
            raise NotImplementedError(f"no backend {name!r} with {op} is installed")
        return found[op](*args, **kwargs)

    return kernel


def late(module: str, name: str) -> Callable:
    """Return a kernel whose module is imported when it is first called.

    The Pallas kernels bring compilers with them that most processes never need.
    """

    def kernel(*args, **kwargs):
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return kernel


@functools.cache
def _backend_ops(name: str) -> Mapping[str, Callable]:
    entries = importlib.metadata.entry_points(group=BACKENDS, name=name)
    if not entries:
        log.warning(
            "No backend %r is installed (entry points of %s): other kernels stand in. "
            "A checkout has them once it is installed: pip install --editable .",
            name,
            BACKENDS,
        )
    return {op: kernel for entry in entries for op, kernel in entry.load()().items()}


def cache_folder() -> Path:
    """Return the folder for compiled kernels: `LORA_JAX_CACHE`, or lora-jax in the user's cache."""
    if named := os.environ.get(CACHE_ENV):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "lora-jax"


def march() -> str:
    """Return the CPU that C++ kernels are compiled for: `LORA_JAX_MARCH`, or this one.

    Raises:
        ValueError: the variable is not the name of a CPU.
    """
    name = os.environ.get(MARCH_ENV) or "native"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name):
        raise ValueError(
            f"{MARCH_ENV}={name!r} is not a name of g++ -march: native, x86-64-v3, armv8.2-a, ..."
        )
    return name


def call(kernels: Mapping[str, Callable], implementation: str | None, *args, **kwargs):
    """Return what the first willing kernel gives; a kernel declines by NotImplementedError.

    Raises:
        NotImplementedError: the one implementation that was named declines, or all do.
    """
    names = candidates(implementation)
    for name in names:
        if name not in kernels:
            continue
        try:
            return kernels[name](*args, **kwargs)
        except NotImplementedError:
            if len(names) == 1:
                raise
    wanted, there = ", ".join(names), ", ".join(kernels)
    raise NotImplementedError(f"none of {wanted} takes these arguments; there are {there}")


def check_dtypes(op: str, **arrays: Array | None) -> None:
    """Raise ValueError unless all arrays share one of the dtypes that every op supports."""
    found = {name: a.dtype for name, a in arrays.items() if a is not None}
    first = next(iter(found.values()))
    if first not in DTYPES or any(dtype != first for dtype in found.values()):
        said = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
        raise ValueError(f"{op}: dtypes must be equal and float32 or bfloat16, got {said}")


def check_dtype(op: str, dtype: DTypeLike, **arrays: Array) -> None:
    """Raise ValueError naming each array that is of another dtype: ids, sizes and factors."""
    for name, a in arrays.items():
        if a.dtype != dtype:
            raise ValueError(f"{op}: {name} {a.shape} is {a.dtype}, expected {jnp.dtype(dtype)}")


def check_shapes(op: str, **shapes: tuple[tuple[int, ...] | None, tuple[int, ...]]) -> None:
    """Raise ValueError naming each argument whose shape is not the one wanted.

    Each keyword is (shape or None if absent, wanted shape).
    """
    for name, (got, want) in shapes.items():
        if got is not None and got != want:
            raise ValueError(f"{op}: {name} has shape {got}, expected {want}")


def shape_of(array: Array | None) -> tuple[int, ...] | None:
    """Return the shape of an optional array."""
    return None if array is None else tuple(array.shape)
