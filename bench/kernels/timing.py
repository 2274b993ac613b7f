"""Kernel timing: programs of many ops, enqueued one behind the other.

One program is one CUDA graph; its arrays rotate or are larger than L2, so that weights are cold.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernels.numbers import random

PROGRAM_US = 1500  # of device time in one call, so that the host's share is small
MOST_OPS = 160  # of one program
COLD_BYTES = 150e6  # of arrays that rotate: two and a half times what L2 holds
# Enqueued before the host waits. A wait takes some 300 us, 1 % of 20 calls: what CALLS more of them
# take is the time, not what one row of calls does.
FEW, CALLS = 4, 16
SAMPLES = 7
TURNS = 9  # samples of programs that are compared
COPY_BYTES = 1 << 31


def repeats_for(expected_us: float, ops: int = 1) -> int:
    """Return how often a program should run `ops` ops that take about `expected_us` each."""
    wanted = max(2, round(PROGRAM_US / (expected_us + 5) / ops))
    return max(1, min(wanted, MOST_OPS // ops))


def cold_sets(num_bytes: float, least: int, most: int) -> int:
    """Return how many sets of arrays, of so many bytes each, L2 keeps nothing of."""
    return max(least, min(math.ceil(COLD_BYTES / max(num_bytes, 1)), most))


def time_us(program: Callable, state: Any, ops: int) -> float:
    """Return microseconds of one of the `ops` in program(state) -> state (donated).

    Of the quarter of the samples that took least: what else the host does only makes them longer.
    """
    state = _warm(program, state)
    rows = []
    for _ in range(SAMPLES):
        row, state = _sample(program, state)
        rows.append(row)
    few, many = (statistics.quantiles(took, n=4)[0] for took in zip(*rows, strict=True))
    return (many - few) / (CALLS * ops)


def times_in_turn_us(programs: list[Callable], ops: int) -> list[float]:
    """Return medians of the same of programs without arguments, sampled in turn.

    A card that runs hot lowers its clock: in turn all run at the same.
    """
    alone = [lambda _, program=program: program() for program in programs]
    for program in alone:
        _warm(program, None)
    rows = [[] for _ in programs]
    for _ in range(TURNS):
        for own, program in zip(rows, alone, strict=True):
            own.append(_sample(program, None)[0])
    return [statistics.median((many - few) / (CALLS * ops) for few, many in own) for own in rows]


def _warm(program: Callable, state: Any) -> Any:
    """Run the program twice: graphs are made by then."""
    for _ in range(2):
        state = program(state)
    return jax.block_until_ready(state)


def _sample(program: Callable, state: Any) -> tuple[tuple[float, float], Any]:
    """Return microseconds of FEW calls and of CALLS more than those, and the last one's state."""
    took = []
    for calls in (FEW, FEW + CALLS):
        start = time.perf_counter()
        for _ in range(calls):
            state = program(state)
        jax.block_until_ready(state)
        took.append((time.perf_counter() - start) * 1e6)
    return (took[0], took[1]), state


def copy_bandwidth(num_bytes: int = COPY_BYTES) -> float:
    """Return bytes per second, read plus written, of a large copy: the driver's or XLA's."""
    values = random(0, (num_bytes // 2048, 1024))
    by_driver = functools.partial(jax.device_put, device=jax.devices()[0], may_alias=False)
    took = min(time_us(copy, values, 1) for copy in (by_driver, jax.jit(jnp.copy)))
    return 2 * num_bytes / (took * 1e-6)


def dense_rate(size: int = 8192) -> float:
    """Return FLOP/s of a dense bfloat16 matmul of XLA's at size^3."""
    a, b = random(1, (size, size), size**-0.5), random(2, (size, size), size**-0.5)
    took = time_us(jax.jit(lambda x: (x @ b).astype(jnp.bfloat16)), a, 1)
    return 2 * size**3 / (took * 1e-6)
