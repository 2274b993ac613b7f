"""Compiled for an H200 on any machine: no spills, bounded temporaries, one CUDA graph per step."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from aot.compile_gpu import H200, Compiled
from jax.experimental.pallas import mosaic_gpu as plgpu

from lora_jax.ops.grouped_matmul import pallas_gpu as grouped_matmul_gpu

pytestmark = pytest.mark.aot


@pytest.fixture(scope="module")
def h200() -> H200:
    """One described H200, through the plugin that `make test-aot` puts on the path."""
    if importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        pytest.skip("the CUDA plugin is not on the path: make test-aot")
    return H200()


@pytest.fixture
def report(request):
    """Say what was compiled: it is the result of these tests as much as their passing."""

    def say(done: Compiled) -> None:
        for name, registers in done.registers.items():
            line = f"{registers} registers, {done.spill_bytes[name]} spilled, "
            line += f"{done.temp_bytes} temp bytes, {done.seconds:.1f} s"
            print(f"{request.node.name}: {name}: {line}")

    return say


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


# rows, groups, d_out, d_in
GROUPED = {
    "decode, 128 experts": (512, 128, 768, 2048),
    "decode, down": (512, 128, 2048, 768),
    "decode, one token": (8, 128, 768, 2048),
    "decode, biased": (64, 32, 2880, 2880),
    "decode, 8 experts": (128, 8, 14336, 4096),
    "prefill, 8 experts": (8192, 8, 14336, 4096),
    "prefill, 64 experts": (8192, 64, 1408, 2048),
}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", GROUPED.values(), ids=GROUPED)
def test_grouped_matmul(h200, report, sizes, gated):
    """One launch, nothing in device memory but the result."""
    rows, groups, d_out, d_in = sizes
    x, w = h200.array((rows, d_in), jnp.bfloat16), h200.array((groups, d_out, d_in), jnp.bfloat16)
    group_sizes = h200.array((groups,), jnp.int32)
    if gated:
        call = functools.partial(grouped_matmul_gpu.gated_matmul, interpret=False)
        done = h200.compile(call, x, w, w, group_sizes)
    else:
        bias = h200.array((groups, d_out), jnp.bfloat16) if groups == 32 else None
        call = functools.partial(grouped_matmul_gpu.grouped_matmul, interpret=False)
        done = h200.compile(call, x, w, group_sizes, bias)
    report(done)
    assert not any(done.spill_bytes.values())
    # A bias is padded to whole tiles.
    assert done.temp_bytes <= (groups * (d_out + 128) * 2 + 1024 if groups == 32 else 0)
    assert done.thunks.count("kCustomCall") == 1
    assert len(done.thunks) <= 2
