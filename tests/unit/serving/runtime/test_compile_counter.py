"""Only watched threads count, and only new programs."""

import threading

import jax
import numpy as np

from serving.runtime.compile_counter import CompileCounter


def compile_something(factor):
    """Compile one program: an argument that jnp makes may be another one."""
    jax.block_until_ready(jax.jit(lambda x: x * factor + 1)(np.float32(2)))


def test_counts_what_watched_threads_compile():
    counter = CompileCounter()
    try:
        compile_something(3.0)
        assert counter.count == 0
        counter.watch_this_thread()
        compile_something(4.0)
        assert counter.count == 1
        other = threading.Thread(target=compile_something, args=(5.0,))
        other.start()
        other.join()
        counter.ignore_this_thread()
        compile_something(6.0)
        assert counter.count == 1
    finally:
        counter.close()
    counter.watch_this_thread()
    compile_something(7.0)
    assert counter.count == 1
