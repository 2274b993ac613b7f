"""Runs TPU kernels on a CPU, as the interpreter models a TPU: memories, DMAs, semaphores, races."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

# What is not written reads as NaN; a DMA's bytes arrive when somebody waits for them.
PARAMS = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


class RaceError(Exception):
    """Two accesses of one memory without an order between them, one of them a write."""


def interpreted(kernel: Callable, **options) -> Callable[..., Any]:
    """Return `kernel` with these static options, jitted; floats come as float32 (bfloat16 exactly).

    The returned function raises RaceError where the interpreter found one.
    """
    quick = {"xla_backend_optimization_level": 0}  # compiling takes longer than running
    jitted = jax.jit(functools.partial(kernel, interpret=PARAMS, **options), compiler_options=quick)

    def on_host(a: jax.Array) -> np.ndarray:
        return np.asarray(a, np.float32 if jnp.issubdtype(a.dtype, jnp.floating) else a.dtype)

    def run(*args) -> Any:
        try:
            got = jax.tree.map(on_host, jitted(*args))
        except BaseException:
            interpreter.reset_tpu_interpret_mode_state()
            raise
        if interpreter.races is not None and interpreter.races.races_found:
            interpreter.reset_tpu_interpret_mode_state()
            raise RaceError(kernel)
        return got

    return run
