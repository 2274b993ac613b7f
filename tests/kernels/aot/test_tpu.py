"""Compiled for TPU v5e and v6e on any machine: every kernel fits VMEM and copies no weights."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels.aot.compile_tpu import Compiled, Tpu
from support.cases.kernel_calls import attention_kernel, lora_kernel

from lora_jax.ops.cases import MODELS, ModelShape
from lora_jax.ops.grouped_matmul import pallas_tpu as grouped_matmul
from lora_jax.ops.lora_gemm import pallas_tpu as lora_gemm
from lora_jax.ops.merge import pallas_tpu as merge
from lora_jax.ops.paged_attention import pallas_tpu as paged_attention
from lora_jax.ops.reroute import pallas_tpu as reroute

pytestmark = pytest.mark.aot

MIB = 1 << 20
VMEM = 128 * MIB  # of a core of either chip
POOL_ROWS = 1 << 16
PAGES = 1 << 14
QWEN3, MIXTRAL, DEEPSEEK = (
    MODELS[name] for name in ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v2-lite")
)
f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


@functools.cache
def described(topology: str) -> Tpu:
    return Tpu(topology)


@pytest.fixture(params=["v5e:2x2", "v6e:2x2"])
def tpu(request) -> Tpu:
    """One described chip, through the compiler that `make test-aot` puts on the path."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not on the path: make test-aot")
    return described(request.param)


def assert_fits(done: Compiled, kernels: int, temp_bytes: int):
    """Check the number of kernels, their VMEM, and the program's own device memory."""
    print(done.vmem_bytes, f"temp {done.temp_bytes} of {temp_bytes}, {done.seconds:.1f} s")
    assert len(done.vmem_bytes) == kernels
    assert all(0 < used <= 0.75 * VMEM for used in done.vmem_bytes.values())
    assert done.temp_bytes <= temp_bytes


# rows, d_in, d_out, greatest rank, dtype
LORA = {
    "qwen3 gate, 64 tokens": (512, QWEN3.hidden, QWEN3.intermediate, 8, bf16),
    "qwen3 down, 256 tokens": (2048, QWEN3.intermediate, QWEN3.hidden, 32, bf16),
    "qwen3 gate, 4096 tokens": (32768, QWEN3.hidden, QWEN3.intermediate, 128, bf16),
    "qwen3 head, 64 tokens": (64, QWEN3.hidden, 151936, 8, bf16),
    "mixtral up, 256 tokens": (512, MIXTRAL.hidden, MIXTRAL.intermediate, 64, bf16),
    "mixtral down, 256 tokens": (512, MIXTRAL.intermediate, MIXTRAL.hidden, 128, bf16),
    "mixtral up, float32": (64, MIXTRAL.hidden, MIXTRAL.intermediate, 128, f32),
    "deepseek gate, 16 tokens": (96, DEEPSEEK.hidden, DEEPSEEK.intermediate, 16, bf16),
    "deepseek q, one token": (1, DEEPSEEK.hidden, 3072, 64, bf16),
}


@pytest.mark.parametrize("sizes", LORA.values(), ids=LORA)
def test_lora_gemm(tpu, sizes):
    """Nothing is kept but one copy of the rows, in another order; no pool is copied."""
    rows, d_in, d_out, rank, dtype = sizes
    pool_rows = POOL_ROWS if d_out < 1 << 15 else POOL_ROWS // 8
    arrays = [tpu.array((rows, d_out), dtype), tpu.array((rows, d_in), dtype)]
    arrays += [tpu.array((pool_rows, width), dtype) for width in (d_in, d_out)]
    arrays += [tpu.array((128, 5), i32), tpu.array((128,), f32)]
    arrays += [tpu.array((rows,), i32)] * 2
    run = functools.partial(lora_kernel(lora_gemm.lora_gemm), max_rank=rank, interpret=False)
    done = tpu.compile(run, *arrays, donate=(0,))
    bound = max(rows, 16) * (d_in + d_out) * dtype.dtype.itemsize + MIB
    if rows <= 2048:
        assert bound < pool_rows * min(d_in, d_out) * dtype.dtype.itemsize
    assert_fits(done, 1, bound)
    assert done.aliased_bytes > 0


# rows, groups, d_out, d_in, dtype, bias
GROUPED = {
    "qwen3 gate, decode": (512, 128, QWEN3.intermediate, QWEN3.hidden, bf16, False),
    "qwen3 down, 4096 tokens": (32768, 128, QWEN3.hidden, QWEN3.intermediate, bf16, False),
    "qwen3 router": (64, 1, 128, QWEN3.hidden, f32, True),
    "qwen3 head": (64, 1, 151936, QWEN3.hidden, bf16, False),
    "mixtral up, 4096 tokens": (8192, 8, MIXTRAL.intermediate, MIXTRAL.hidden, bf16, False),
    "mixtral down, decode": (16, 8, MIXTRAL.hidden, MIXTRAL.intermediate, bf16, True),
    "mixtral up, float32": (8192, 8, MIXTRAL.intermediate, MIXTRAL.hidden, f32, False),
    "deepseek gate, decode": (96, 64, DEEPSEEK.intermediate, DEEPSEEK.hidden, bf16, False),
    "deepseek dense, float32": (32, 1, 10944, DEEPSEEK.hidden, f32, False),
    "a map to one number": (5, 1, 1, QWEN3.hidden, f32, False),
}


@pytest.mark.parametrize("sizes", GROUPED.values(), ids=GROUPED)
def test_grouped_matmul(tpu, sizes):
    """Nothing but the table of items is kept."""
    rows, groups, d_out, d_in, dtype, bias = sizes
    arrays = [tpu.array((rows, d_in), dtype), tpu.array((groups, d_out, d_in), dtype)]
    arrays += [tpu.array((groups,), i32), tpu.array((groups, d_out), dtype) if bias else None]
    run = functools.partial(grouped_matmul.grouped_matmul, interpret=False)
    done = tpu.compile(run, *arrays)
    assert_fits(done, 1, 2 * MIB)


# rows, groups, d_out, d_in, dtype, dtype of the addends
GATED = {
    "qwen3, decode": (512, 128, QWEN3.intermediate, QWEN3.hidden, bf16, f32),
    "qwen3, 4096 tokens": (32768, 128, QWEN3.intermediate, QWEN3.hidden, bf16, None),
    "mixtral, 4096 tokens": (8192, 8, MIXTRAL.intermediate, MIXTRAL.hidden, bf16, f32),
    "qwen3, 4096 tokens, float32": (32768, 128, QWEN3.intermediate, QWEN3.hidden, f32, f32),
    "deepseek, decode": (96, 64, DEEPSEEK.intermediate, DEEPSEEK.hidden, bf16, bf16),
}


@pytest.mark.parametrize("sizes", GATED.values(), ids=GATED)
def test_gated_matmul(tpu, sizes):
    """One kernel for both products, addends and activation; neither product is kept."""
    rows, groups, d_out, d_in, dtype, added = sizes
    arrays = [tpu.array((rows, d_in), dtype)] + [tpu.array((groups, d_out, d_in), dtype)] * 2
    arrays += [tpu.array((groups,), i32)]
    arrays += [tpu.array((rows, d_out), added)] * 2 if added else []
    run = functools.partial(grouped_matmul.gated_matmul, interpret=False)
    assert_fits(tpu.compile(run, *arrays), 1, 2 * MIB)


def test_an_addend_is_added_in_the_kernel(tpu):
    rows, wide, narrow = 32768, QWEN3.hidden, QWEN3.intermediate
    arrays = [tpu.array((rows, narrow), bf16), tpu.array((128, wide, narrow), bf16)]
    arrays += [tpu.array((128,), i32), None, tpu.array((rows, wide), f32)]
    run = functools.partial(grouped_matmul.grouped_matmul, interpret=False)
    assert_fits(tpu.compile(run, *arrays), 1, 2 * MIB)


# tokens, k, experts, slots and groups of ESFT
ROWS = {
    "mixtral, one token": (1, MIXTRAL.top_k, MIXTRAL.num_experts, 0, 0),
    "qwen3, 64 tokens": (64, QWEN3.top_k, QWEN3.num_experts, 0, 0),
    "qwen3, 16384 tokens": (16384, QWEN3.top_k, QWEN3.num_experts, 0, 0),
    "deepseek with ESFT, 64 tokens": (64, DEEPSEEK.top_k, DEEPSEEK.num_experts, 10, 192),
    "deepseek with ESFT, 4096 tokens": (4096, DEEPSEEK.top_k, DEEPSEEK.num_experts, 300, 512),
}


@pytest.mark.parametrize("sizes", ROWS.values(), ids=ROWS)
def test_row_map(tpu, sizes):
    """Nothing is sorted or scattered, and little is kept."""
    tokens, k, experts, slots, groups = sizes
    arrays = [tpu.array((tokens, k), i32)]
    if slots:
        arrays += [tpu.array((tokens,), i32), tpu.array((slots, experts), i32)]
    op, groups = (reroute.reroute, groups) if slots else (reroute.row_map, experts)
    done = tpu.compile(
        lambda *arrays: op(*arrays, groups, interpret=False), *arrays, tpu.array((), i32)
    )
    assert_fits(done, 1, MIB)
    assert not re.search(r" (sort|scatter)\(", done.text)


# matrices, d_out, d_in, greatest rank, dtype
MERGE = {
    "llama q": (32, 4096, 4096, 64, bf16),
    "mixtral down": (32, MIXTRAL.hidden, MIXTRAL.intermediate, 128, bf16),
    "qwen3 q, float32": (48, 4096, QWEN3.hidden, 8, f32),
}


@pytest.mark.parametrize("sizes", MERGE.values(), ids=MERGE)
def test_merge(tpu, sizes):
    """Works in place; nothing is kept."""
    matrices, d_out, d_in, rank, dtype = sizes
    arrays = [tpu.array((matrices, d_out, d_in), dtype)]
    arrays += [tpu.array((POOL_ROWS // 8, width), dtype) for width in (d_in, d_out)]
    arrays += [tpu.array((matrices, 3), i32), tpu.array((matrices,), f32)]
    run = functools.partial(merge.merge, max_rank=rank, interpret=False)
    done = tpu.compile(run, *arrays, donate=(0,))
    assert_fits(done, 1, MIB)
    assert done.aliased_bytes == matrices * d_out * d_in * dtype.dtype.itemsize


def attention(tpu: Tpu, model: ModelShape, tokens: int, dtype, order=None, page_size=16):
    """Compile attention of 64 sequences of up to 256 pages."""
    pages = (PAGES, page_size, model.kv_heads)
    k = tpu.array((*pages, model.k_dim), dtype, order)
    v = None if model.latent else tpu.array((*pages, model.v_dim), dtype)
    arrays = [tpu.array((tokens, model.q_heads, model.k_dim), dtype), k, v]
    arrays += [tpu.array((64, 256), i32), tpu.array((tokens,), i32), tpu.array((tokens,), i32)]
    arrays += [tpu.array((), i32), tpu.array((model.q_heads,), f32) if model.sinks else None]
    run = functools.partial(
        attention_kernel(paged_attention.paged_attention),
        scale=0.1,
        v_dim=model.v_dim,
        sliding_window=model.sliding_window,
        interpret=False,
    )
    return tpu.compile(run, *arrays)


SINKS = ModelShape(2880, 2880, 32, 4, 64, 8, 128, 128, sliding_window=128, sinks=True)
# model, tokens, dtype, order of the axes of K
ATTENTION = {
    "qwen3 decode": (QWEN3, 64, bf16, None),
    "qwen3 one token": (QWEN3, 1, bf16, None),
    "mixtral prefill": (MIXTRAL, 512, bf16, None),
    "window and sinks, float32": (SINKS, 64, f32, None),
    "deepseek prefill": (DEEPSEEK, 512, bf16, (0, 2, 1, 3)),
    "deepseek decode, float32": (DEEPSEEK, 64, f32, (0, 1, 2, 3)),
}


@pytest.mark.parametrize("sizes", ATTENTION.values(), ids=ATTENTION)
def test_paged_attention(tpu, sizes):
    """Nothing is kept but q and the result in float32, of heads padded to 8; no page is copied."""
    model, tokens, dtype, order = sizes
    heads = model.kv_heads * -(-model.q_heads // model.kv_heads // 8) * 8
    bound = tokens * heads * (-(-model.k_dim // 128) * 128 + model.v_dim) * 4 + MIB
    assert bound < PAGES * 16 * model.kv_heads * model.k_dim * dtype.dtype.itemsize
    assert_fits(attention(tpu, model, tokens, dtype, order), 1, bound)


def test_a_copy_of_all_pages_is_seen(tpu):
    """576 is no multiple of 128: XLA's own order of axes is not the kernel's."""
    done = attention(tpu, DEEPSEEK, 64, bf16)
    assert done.temp_bytes >= PAGES * 16 * DEEPSEEK.k_dim * 2


def test_more_than_vmem_is_refused(tpu):
    def kernel(x_ref, y_ref, scratch_ref):
        scratch_ref[...] = jnp.zeros_like(scratch_ref)
        y_ref[...] = x_ref[...] + scratch_ref[:8]

    one = jax.ShapeDtypeStruct((8, 128), f32)
    scratch = [pltpu.VMEM((2 * VMEM // 512, 128), f32)]
    with pytest.raises(Exception, match="exceed memory"):
        tpu.compile(pl.pallas_call(kernel, one, scratch_shapes=scratch), tpu.array((8, 128), f32))
