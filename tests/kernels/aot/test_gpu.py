"""Compiled for an H200 on any machine: no spills, bounded temporaries, one CUDA graph per step."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernels.aot.compile_gpu import H200, KIND, Compiled, plugin_is_found
from support.cases.kernel_calls import attention_kernel, lora_kernel

from lora_jax.ops import tuning_table
from lora_jax.ops.cases import MODELS
from lora_jax.ops.grouped_matmul import pallas_gpu as grouped_matmul_gpu
from lora_jax.ops.grouped_matmul import xla as grouped_matmul_xla
from lora_jax.ops.lora_gemm import pallas_gpu as lora_gemm_gpu
from lora_jax.ops.merge import pallas_gpu as merge_gpu
from lora_jax.ops.paged_attention import pallas_gpu as paged_attention_gpu
from lora_jax.ops.reroute import pallas_gpu as reroute_gpu

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]  # of tilings that take ptxas minutes


@pytest.fixture(scope="module")
def h200() -> H200:
    """One described H200, through the plugin that `make test-aot` puts on the path."""
    if not plugin_is_found():
        pytest.skip("the CUDA plugin is not on the path: make test-aot")
    return H200()


@pytest.fixture(autouse=True)
def tuned(monkeypatch):
    """Take the tilings of the device that is compiled for."""
    monkeypatch.setattr(tuning_table, "find", functools.partial(tuning_table.find, device=KIND))


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
    "decode, one token": (8, 128, 768, 2048),
    "decode, biased": (64, 32, 2880, 2880),
    "prefill, 8 experts": (8192, 8, 14336, 4096),
    "prefill, biased": (8192, 32, 2880, 2880),
}


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", GROUPED.values(), ids=GROUPED)
def test_grouped_matmul(h200, report, sizes, gated, added):
    """One launch, nothing in device memory but the result."""
    rows, groups, d_out, d_in = sizes
    x, w = h200.array((rows, d_in), jnp.bfloat16), h200.array((groups, d_out, d_in), jnp.bfloat16)
    group_sizes = h200.array((groups,), jnp.int32)
    addends = [h200.array((rows, d_out), jnp.bfloat16)] * (added + (added and gated))
    if gated:
        call = functools.partial(grouped_matmul_gpu.gated_matmul, interpret=False)
        done = h200.compile(call, x, w, w, group_sizes, *addends)
    else:
        bias = h200.array((groups, d_out), jnp.bfloat16) if groups == 32 else None
        call = functools.partial(grouped_matmul_gpu.grouped_matmul, interpret=False)
        done = h200.compile(call, x, w, group_sizes, bias, *addends)
    report(done)
    assert not any(done.spill_bytes.values())
    # A bias is padded to whole tiles.
    assert done.temp_bytes <= (groups * (d_out + 256) * 2 + 1024 if groups == 32 else 0)
    assert done.thunks.count("kCustomCall") == 1
    assert len(done.thunks) <= 2


WHOLE = r"= (?:bf16|f32)\[{},.*? (?!parameter|get-tuple-element|while)[\w-]+\("


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_portable_grouped_matmul_reads_no_expert_without_rows(h200, dtype):
    """Where no memory lies behind an index, reading it ends the process (virtual tensors)."""
    groups = 97
    x, w = h200.array((64, 128), dtype), h200.array((groups, 96, 128), dtype)
    call = functools.partial(grouped_matmul_xla.grouped_matmul, bias=None)
    done = h200.compile(call, x, w, h200.array((groups,), jnp.int32))
    whole = re.compile(WHOLE.format(groups))
    assert not whole.findall(done.text)
    readers = re.findall(rf"(%[\w.-]+) = \w+\[{groups},96,128\]\S* parameter\(0\)", done.text)
    assert readers
    for name in readers:
        users = re.findall(rf"= \S+ ([\w-]+)\({re.escape(name)}[,)]", done.text)
        assert {*users} <= {"dynamic-slice", "tuple", "while"}, name
    done = h200.compile(lambda w: w[:, :, ::-1], w)  # reads them all, and is seen
    assert whole.findall(done.text)


def lora_arrays(h200, rows: int, d_out: int, d_in: int, rank: int, slots: int) -> tuple:
    """Return the arguments of lora_gemm with one pool row per rank row of each slot."""
    bf16, i32 = jnp.bfloat16, jnp.int32
    shapes = [((rows, d_out), bf16), ((rows, d_in), bf16)]
    shapes += [((slots * rank, d_in), bf16), ((slots * rank, d_out), bf16), ((slots, 5), i32)]
    shapes += [((slots,), jnp.float32), ((rows,), i32), ((rows,), i32)]
    return tuple(h200.array(*shape) for shape in shapes)


# rows, d_out, d_in, rank, slots
LORA = {
    "1024 tokens": (1024, 14336, 4096, 64, 512),
    "64 tokens": (64, 14336, 4096, 64, 512),
    "rank 8": (1024, 14336, 4096, 8, 512),
    "rank 128": (1024, 14336, 4096, 128, 512),
    "prefill": (4096, 4096, 4096, 64, 4),
    "prefill, rank 128": (4096, 4096, 4096, 128, 4),
    "experts of Qwen3-30B": (2048, 768, 2048, 32, 128),
    "odd": (21, 1408, 2880, 16, 3),
}


@pytest.mark.parametrize("sizes", LORA.values(), ids=LORA)
def test_lora_gemm(h200, report, sizes):
    """Works in place; takes x in order, the parts of x A^T and 2 KiB a row for everything else."""
    rows, d_out, d_in, rank, slots = sizes
    call = functools.partial(lora_kernel(lora_gemm_gpu.lora_gemm), max_rank=rank, interpret=False)
    done = h200.compile(call, *lora_arrays(h200, rows, d_out, d_in, rank, slots), donate=(0,))
    report(done)
    assert not any(done.spill_bytes.values())
    parts = 4 * min(8, round(d_in / 1024)) * 64 * -(-(rank + 7) // 64)
    assert done.temp_bytes <= (rows + 7) * (2 * d_in + parts + 2048)
    assert done.thunks == ["kCommandBuffer"]
    assert f"bf16[{rows},{d_out}]{{1,0}} copy(" not in done.text


# model, sequences, tokens of each
ATTENTION = {
    "decode, Qwen3-30B": ("qwen3-30b-a3b", 64, 1),
    "decode, Llama-8B": ("llama-8b", 64, 1),
    "decode, GPT-OSS": ("gpt-oss-20b", 64, 1),
    "decode, DeepSeek-V2-Lite": ("deepseek-v2-lite", 64, 1),
    "prompt, Qwen3-30B": ("qwen3-30b-a3b", 1, 2048),
    "prompt, GPT-OSS": ("gpt-oss-20b", 1, 2048),
    "prompt, DeepSeek-V2-Lite": ("deepseek-v2-lite", 1, 2048),
}


@pytest.mark.parametrize("sizes", ATTENTION.values(), ids=ATTENTION)
def test_paged_attention(h200, report, sizes):
    """One graph, which reads pages where they lie; takes the parts of chunks, 256 bytes an item."""
    model, sequences, per_sequence = sizes
    shape, bf16, i32 = MODELS[model], jnp.bfloat16, jnp.int32
    tokens, page = sequences * per_sequence, (4096, 16, shape.kv_heads)
    integers = [((sequences, 128), i32), ((tokens,), i32), ((tokens,), i32), ((), i32)]
    k, v = (h200.array((*page, dim), bf16) for dim in (shape.k_dim, shape.v_dim))
    args = [h200.array((tokens, shape.q_heads, shape.k_dim), bf16), k]
    args += [None if shape.latent else v, *(h200.array(*a) for a in integers)]
    args += [h200.array((shape.q_heads,), jnp.float32) if shape.sinks else None]
    options = {"scale": 0.1, "v_dim": shape.v_dim, "sliding_window": shape.sliding_window}
    call = functools.partial(
        attention_kernel(paged_attention_gpu.paged_attention), **options, interpret=False
    )
    done = h200.compile(call, *args)
    report(done)
    assert not any(done.spill_bytes.values())
    cut = per_sequence == 1
    assert len(done.registers) == 1 + cut
    # Four chunks of 512 positions; queries in tiles of 8 or 16.
    heads = shape.kv_heads * max(8, shape.q_heads // shape.kv_heads)
    parts = 4 * tokens * heads * (shape.v_dim + 2) * 4 if cut else 0
    assert done.temp_bytes <= parts + 256 * 4 * tokens
    assert done.thunks == ["kCommandBuffer"]


@pytest.mark.parametrize("rank", [8, 64, 128])
def test_merge(h200, report, rank):
    """Works in place, in one launch; takes nothing beside the weights."""
    bf16, width = jnp.bfloat16, 4096
    shapes = [((32, width, width), bf16), ((99, width), bf16), ((99, width), bf16)]
    shapes += [((32, 3), jnp.int32), ((32,), jnp.float32)]
    call = functools.partial(merge_gpu.merge, max_rank=rank, interpret=False)
    done = h200.compile(call, *(h200.array(*shape) for shape in shapes), donate=(0,))
    report(done)
    assert not any(done.spill_bytes.values())
    assert done.temp_bytes == 0
    assert done.thunks == ["kCustomCall"]


@pytest.mark.parametrize("rerouted", [False, True])
@pytest.mark.parametrize(("tokens", "groups"), [(64, 128), (1024, 388), (16384, 1023)])
def test_row_map(h200, report, tokens, groups, rerouted):
    """Takes counts of groups by CTA, where there are several, and no launch of XLA's."""
    some = functools.partial(h200.array, dtype=jnp.int32)
    ids, num_tokens, owners = some((tokens, 8)), some(()), (some((tokens,)), some((20, 128)))
    op = reroute_gpu.reroute if rerouted else reroute_gpu.row_map
    call = lambda *args: op(*args, groups, interpret=False)  # noqa: E731
    done = h200.compile(call, ids, *(owners if rerouted else ()), num_tokens)
    report(done)
    assert not any(done.spill_bytes.values())
    launches = 1 if tokens == 64 else 2
    assert done.thunks == ["kCustomCall"] * launches
    assert done.temp_bytes <= (launches - 1) * 128 * 4 * (groups + 64)


def decode_layer(x, kv, weights, lora, row_to_slot, group_sizes):
    """Return x after something like attention and something like experts, adapters on both."""
    adapters = functools.partial(lora_kernel(lora_gemm_gpu.lora_gemm), max_rank=32, interpret=False)
    experts = functools.partial(grouped_matmul_gpu.grouped_matmul, interpret=False)
    none = jnp.zeros_like(row_to_slot)
    q = adapters(x @ weights["q"], x, *lora, row_to_slot, none)
    scores = jnp.einsum("td,sd->ts", q, kv, preferred_element_type=jnp.float32)
    x = x + jax.nn.softmax(scores, axis=-1).astype(x.dtype) @ kv
    rows = jnp.repeat(x, 8, axis=0)
    row_to_slot = jnp.repeat(row_to_slot, 8)
    up = experts(rows, weights["up"], group_sizes, None)
    down = experts(jnp.tanh(up), weights["down"], group_sizes, None)
    row_to_expert = jnp.zeros_like(row_to_slot)
    down = adapters(down, rows, *lora, row_to_slot, row_to_expert)
    return x + down.reshape(-1, 8, x.shape[1]).sum(1)


def test_a_decode_step_of_four_layers_is_one_graph(h200, report):
    bf16, i32 = jnp.bfloat16, jnp.int32
    kv = h200.array((512, 2048), bf16)
    shapes = {"q": (2048, 2048), "up": (128, 768, 2048), "down": (128, 2048, 768)}
    weights = {name: h200.array(shape, bf16) for name, shape in shapes.items()}
    _, x, *lora, row_to_slot, _ = lora_arrays(h200, 64, 2048, 2048, 32, 128)

    def step(x, kv, weights, lora, row_to_slot, group_sizes):
        for _ in range(4):
            x = decode_layer(x, kv, weights, lora, row_to_slot, group_sizes)
        return x

    args = (x, kv, weights, tuple(lora), row_to_slot, h200.array((128,), i32))
    done = h200.compile(step, *args, donate=(0,))
    report(done)
    assert done.text.count('custom_call_target="mosaic_gpu_v2"') == 4 * 6
    assert len(done.registers) == 6  # compiled once, not once a layer
    assert done.thunks == ["kCommandBuffer"]
    assert not any(done.spill_bytes.values())
    # 512 rows of the experts, of each width once or twice, and the parts of the adapters' x A^T.
    assert done.temp_bytes < 16 << 20
