"""How every kernel is timed here: programs of many ops, enqueued one behind the other.

One program is one CUDA graph; its arrays rotate or are larger than L2, so that weights are cold.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp

PROGRAM_US = 1500  # of device time in one call, so that the host's share is small
CALLS = 32  # enqueued before the host waits, which costs some 100 us
SAMPLES = 7
COPY_BYTES = 1 << 31


def random(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    """Return normal bfloat16 numbers times `scale`, made on the device."""
    make = functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16)
    return jax.jit(lambda key: make(key) * jnp.bfloat16(scale))(jax.random.key(seed))


def repeats_for(expected_us: float, ops: int = 1) -> int:
    """Return how often a program should run `ops` ops that take about `expected_us` each."""
    return max(2, round(PROGRAM_US / (expected_us + 5) / ops))


def time_us(program, state, ops: int) -> float:
    """Return median microseconds of one of the `ops` in program(state) -> state (donated)."""
    for _ in range(3):
        state = program(state)
    jax.block_until_ready(state)
    samples = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        for _ in range(CALLS):
            state = program(state)
        jax.block_until_ready(state)
        samples.append((time.perf_counter() - start) * 1e6 / (CALLS * ops))
    return statistics.median(samples)


def copy_bandwidth(num_bytes: int = COPY_BYTES) -> float:
    """Return bytes per second, read plus written, of a large copy: the driver's or XLA's."""
    values = random(0, (num_bytes // 2,))
    by_driver = functools.partial(jax.device_put, device=jax.devices()[0], may_alias=False)
    took = min(time_us(copy, values, 1) for copy in (by_driver, jax.jit(jnp.copy)))
    return 2 * num_bytes / (took * 1e-6)


def dense_rate(size: int = 8192) -> float:
    """Return FLOP/s of a dense bfloat16 matmul of XLA's at size^3."""
    a, b = random(1, (size, size), size**-0.5), random(2, (size, size), size**-0.5)
    took = time_us(jax.jit(lambda x: (x @ b).astype(jnp.bfloat16)), a, 1)
    return 2 * size**3 / (took * 1e-6)
