"""How every kernel is timed here: programs of many ops, enqueued one behind the other.

One program is one CUDA graph; its arrays rotate or are larger than L2, so that weights are cold.
The device is busy until all calls have been enqueued: it is timed alone.
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
# Enqueued before the host waits, which takes a while itself: what CALLS more of them take is the
# time, not what one row of calls does.
FEW, CALLS = 2, 8
BUSY_BYTES = 1 << 31  # 4 ms of four passes
SAMPLES = 7
TURNS = 9  # samples of programs that are compared
COPY_BYTES = 1 << 31


def repeats_for(expected_us: float, ops: int = 1) -> int:
    """Return how often a program should run `ops` ops that take about `expected_us` each."""
    wanted = max(2, round(PROGRAM_US / (expected_us + 5) / ops))
    return max(1, min(wanted, MOST_OPS // ops))


def cold_sets(num_bytes: float, least: int, most: int) -> int:
    """Return how many sets of arrays, of so many bytes each, L2 keeps nothing of."""
    return max(least, min(math.ceil(COLD_BYTES / num_bytes), most))


def time_us(program: Callable, state: Any, ops: int) -> float:
    """Return microseconds of one of the `ops` in program(state) -> state (donated).

    Medians of samples: what else the host does makes it see the begin or the end late.
    """
    state, busy = _warm(program, state), Busy()
    rows = []
    for _ in range(SAMPLES):
        row, state = _sample(program, state, busy)
        rows.append(row)
    few, many = (statistics.median(took) for took in zip(*rows, strict=True))
    return (many - few) / (CALLS * ops)


def times_in_turn_us(programs: list[Callable], ops: int) -> list[float]:
    """Return medians of the same of programs without arguments, sampled in turn.

    A card that runs hot lowers its clock: in turn all run at the same.
    """
    alone, busy = [lambda _, program=program: program() for program in programs], Busy()
    for program in alone:
        _warm(program, None)
    rows = [[] for _ in programs]
    for _ in range(TURNS):
        for own, program in zip(rows, alone, strict=True):
            own.append(_sample(program, None, busy)[0])
    return [statistics.median((many - few) / (CALLS * ops) for few, many in own) for own in rows]


def _warm(program: Callable, state: Any) -> Any:
    """Run the program twice: graphs are made by then."""
    for _ in range(2):
        state = program(state)
    return jax.block_until_ready(state)


class Busy:
    """What the device does until the host has enqueued all that is timed.

    So the host takes no part in a time: programs of many arguments, or whose results lie elsewhere
    at each call, cost it more than small ops the device.
    """

    def __init__(self):
        self.values: Any = jnp.zeros(BUSY_BYTES // 2, jnp.bfloat16)
        self.rounds = 1

    def begin(self) -> None:
        """Enqueue some milliseconds."""
        for _ in range(self.rounds):
            self.values = _pass_over(self.values)

    def lasted(self) -> bool:
        """Return, once it has ended, whether it had not when this was called; else have more."""
        in_time = not self.values.is_ready()
        jax.block_until_ready(self.values)
        self.rounds *= 1 if in_time else 2
        return in_time


@functools.partial(jax.jit, donate_argnums=0)
def _pass_over(values: jax.Array) -> jax.Array:
    for _ in range(4):
        values = jax.lax.optimization_barrier(values + 1)
    return values


def _sample(program: Callable, state: Any, busy: Busy) -> tuple[tuple[float, float], Any]:
    """Return microseconds of FEW calls and of CALLS more than those, and the last one's state."""
    took = []
    for calls in (FEW, FEW + CALLS):
        in_time = False
        while not in_time:
            busy.begin()
            for _ in range(calls):
                state = program(state)
            in_time = busy.lasted()
            start = time.perf_counter()
            jax.block_until_ready(state)
            last = (time.perf_counter() - start) * 1e6
        took.append(last)
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
