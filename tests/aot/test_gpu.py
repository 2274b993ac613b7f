"""Compiled for an H200 on any machine: no spills, bounded temporaries, one CUDA graph per step."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from aot.compile_gpu import H200
from jax.experimental.pallas import mosaic_gpu as plgpu

pytestmark = pytest.mark.aot


@pytest.fixture(scope="module")
def h200() -> H200:
    """One described H200, through the plugin that `make test-aot` puts on the path."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("the CUDA plugin is not on the path: make test-aot")
    return H200()


def chain(x, w):
    """Return x after eight small maps."""
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return x


def test_a_chain_of_operations_is_one_graph(h200):
    square = h200.array((256, 256), jnp.bfloat16)
    done = h200.compile(chain, square, square)
    assert done.command_buffers == 1
    assert done.in_graphs >= 8


def test_what_is_not_in_a_graph_is_seen(h200):
    square = h200.array((256, 256), jnp.bfloat16)
    body = lambda _, x: chain(x, x)  # noqa: E731
    done = h200.compile(lambda n, x: jax.lax.fori_loop(0, n, body, x), h200.array((), "i4"), square)
    assert "kWhile" in done.thunks
    assert done.temp_bytes >= 256 * 256 * 2


def crowded(x_ref, y_ref):
    """Hold more values than there are registers: all are needed after their sum is known."""
    x = x_ref[...]
    y_ref[...] = x * jnp.sum(x)


def test_spills_are_seen(h200):
    """512 values for each of 128 threads."""
    shape = (128, 512)
    one = jax.ShapeDtypeStruct(shape, jnp.float32)
    done = h200.compile(plgpu.kernel(crowded, out_type=one), h200.array(shape, jnp.float32))
    assert max(done.registers.values()) > 200
    assert sum(done.spill_bytes.values()) > 0
