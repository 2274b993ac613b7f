"""Grouped matmul in Mosaic GPU: interpreted on a CPU, lowered for CUDA, and run where there is one.

On a GPU: JAX_PLATFORMS=cuda PYTHONPATH=src:tests:. python3 -m pytest --noconftest -m gpu FILE
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support.cases.grouped_matmul_cases import DEEP, TALL, WIDE, arrays, some_addends, some_case
from support.doubles.mosaic import interpreted
from support.drivers.lowering import launches
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops.cases import MODELS, GroupedCase
from lora_jax.ops.grouped_matmul import composed, pallas_gpu, reference
from lora_jax.ops.grouped_matmul._gpu_tiles import (
    GroupedMatmulConfig,
)

SMALL = GroupedMatmulConfig(columns=64, warpgroups=1, rows=16, stages=2, ctas=1)
# Three parts on the way out, of which the third takes the place of the first.
PARTS = GroupedMatmulConfig(columns=64, warpgroups=1, rows=48, stages=2, ctas=1)
# rows in a group, config: one row, empty groups, borders off the grid of 8, several tiles of rows.
INTERPRETED = [
    ("uniform", 17, SMALL),
    ("skewed", 16, SMALL),
    ("none", 16, SMALL),
    ("identical", 1, SMALL),
    ("uniform", 67, WIDE),
]
wanted = jax.jit(reference.grouped_matmul)
wanted_of_two = jax.jit(functools.partial(composed.gated_matmul, reference.grouped_matmul))


def with_nan(case: GroupedCase, rows: int) -> GroupedCase:
    """Return the case with NaN in the rows that are in no group."""
    x = np.array(case.x)
    x[rows:] = np.nan
    return dataclasses.replace(case, x=jnp.asarray(x))


def wide(array: jax.Array) -> np.ndarray:
    """Return bfloat16 as float32, which is exact."""
    return np.asarray(array.astype(jnp.float32))


@functools.cache
def interpreted_kernel(config: GroupedMatmulConfig, interpret: plgpu.InterpretGPUParams):
    """Return the op, compiled once for each config and size: that takes longer than running it."""
    return jax.jit(functools.partial(pallas_gpu.grouped_matmul, config=config, interpret=interpret))


@pytest.mark.parametrize(("popularity", "rows", "config"), INTERPRETED, ids=str)
def test_interpreted_matches_the_reference(popularity, rows, config):
    padding = (70 if config == WIDE else 21) - rows
    case = some_case((rows, padding, 4, 136, 128), popularity, bias=True)
    case = with_nan(case, rows)
    with interpreted() as interpret:
        got = interpreted_kernel(config, interpret)(*arrays(case), num_rows=jnp.int32(rows))
    np.testing.assert_allclose(wide(got), wide(wanted(*arrays(case))), **TOLERANCE["bfloat16"])
    assert not wide(got)[rows if popularity != "none" else 0 :].any()


@pytest.mark.long
def test_interpreted_rows_have_the_same_bits_in_any_tile():
    case = some_case((21, 0, 4, 136, 256), "identical", bias=True)
    rows = np.random.default_rng(2).permutation(21)
    moved = GroupedCase(
        case.x[rows], case.w[::-1], jnp.array([0, 0, 5, 16], jnp.int32), case.bias[::-1]
    )
    with interpreted() as interpret:
        whole = interpreted_kernel(SMALL, interpret)(*arrays(case))
        some = interpreted_kernel(TALL, interpret)(*arrays(moved))
        deep = interpreted_kernel(DEEP, interpret)(*arrays(case))
    np.testing.assert_array_equal(wide(some)[5:], wide(whole)[rows][5:])
    np.testing.assert_array_equal(wide(deep), wide(whole))


# With addends in one dtype or the other, and parts of tiles that others' rows share.
@pytest.mark.long
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_interpreted_gate_and_up_in_one_launch(dtype):
    case = some_case((37, 3, 2, 72, 128), "uniform", bias=False)
    up = case.w[:, ::-1]
    addends = some_addends(case, 37, 2, dtype) if dtype else ()
    call = functools.partial(pallas_gpu.gated_matmul, config=PARTS)
    with interpreted() as interpret:
        args = (case.x, case.w, up, case.group_sizes)
        got = call(*args, *addends, interpret=interpret).block_until_ready()
    want = wanted_of_two(*args, *addends)
    np.testing.assert_allclose(wide(got), wide(want), **TOLERANCE["bfloat16"])
    assert not wide(got)[37:].any()


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_interpreted_addend_is_added_to_the_rounded_product(dtype):
    case = some_case((21, 3, 2, 72, 64), "uniform", bias=True)
    (addend,) = some_addends(case, 21, 1, dtype)
    with interpreted() as interpret:
        run = interpreted_kernel(SMALL, interpret)
        plain = run(*arrays(case))
        got = run(*arrays(case), addend).block_until_ready()
    want = composed.grouped_matmul(lambda *_: plain, *arrays(case), addend)
    np.testing.assert_array_equal(wide(got), wide(want))
    np.testing.assert_array_equal(wide(got)[:21:3], wide(plain)[:21:3])


@pytest.mark.long
def test_interpreted_addends_of_no_row_are_not_read():
    """They may hold anything: copies begin behind the last row, where there are zeros."""
    case = some_case((21, 3, 2, 72, 64), "uniform", bias=True)
    anything, none = jnp.full((24, 72), jnp.nan, jnp.bfloat16), jnp.zeros((1,), jnp.int32)
    with interpreted() as interpret:
        run = functools.partial(interpreted_kernel(SMALL, interpret), *arrays(case))
        got = run(anything, num_added=none).block_until_ready()
        read = run(jnp.zeros_like(anything), num_added=none + 1).block_until_ready()
    np.testing.assert_array_equal(wide(got), wide(read))


# model, rows, weights, dtype of addends, bias
LOWERED = {
    "decode": ("qwen3-30b-a3b", 8, 1, None, False),
    "biased": ("gpt-oss-20b", 21, 1, "bfloat16", True),
    "gated": ("qwen3-30b-a3b", 512, 2, "float32", False),
}
# How many products on tensor cores each has, all of one shape.
PRODUCTS = {"decode": (4, "m64n8k16"), "biased": (8, "m64n8k16"), "gated": (8, "m64n16k16")}


def lowered(model: str, rows: int, matrices: int, added: str | None, biased: bool, **options):
    """Return the one launch of a product, or of gate and up, at a model's sizes."""
    sizes, bf16, shape = MODELS[model], jnp.bfloat16, jax.ShapeDtypeStruct
    groups, d_out, d_in = sizes.num_experts, sizes.intermediate, sizes.hidden
    weights = [shape((groups, d_out, d_in), bf16)] * matrices
    bias = [shape((groups, d_out), bf16) if biased else None] * (2 - matrices)
    addends = [shape((rows, d_out), jnp.dtype(added))] * matrices if added else []
    op = pallas_gpu.gated_matmul if matrices == 2 else pallas_gpu.grouped_matmul
    arrays = shape((rows, d_in), bf16), *weights, shape((groups,), jnp.int32), *bias, *addends
    (launch,) = launches(functools.partial(op, interpret=False, **options), *arrays)
    return launch


@pytest.mark.parametrize("name", LOWERED)
def test_lowers_for_cuda_at_real_sizes(name):
    """All SMs, a warpgroup that copies, tensor cores for each weight, and room in shared memory."""
    launch = lowered(*LOWERED[name])
    assert launch.name == "_grouped_matmul_kernel"
    assert launch.grid in ((132, 1, 1), (264, 1, 1))
    ctas_of_an_sm = launch.grid[0] // 132
    assert ctas_of_an_sm * (launch.shared_bytes + 1024) <= 227 * 1024
    assert launch.threads in (256, 384)
    count, shape = PRODUCTS[name]
    product = f"wgmma.mma_async.sync.aligned.{shape}.f32.bf16.bf16"
    found = [launch.assembly.count(text) for text in ("wgmma.mma_async", product)]
    assert found == [count, count]
    assert "setmaxnreg" not in launch.assembly


def test_lowers_q_k_and_v_as_one_launch():
    """Of 4096, 512 and 512 columns: each has descriptors of its own, the product is there once."""
    bf16, shape = jnp.bfloat16, jax.ShapeDtypeStruct
    weights = [shape((width, 2048), bf16) for width in (4096, 512, 512)]
    call = lambda x, ws, n: pallas_gpu.joined_matmul(x, ws, n, [None] * 3, interpret=False)  # noqa: E731
    arrays = shape((32, 2048), bf16), weights, shape((), jnp.int32)
    (launch,) = launches(call, *arrays)
    assert launch.grid in ((132, 1, 1), (264, 1, 1))
    assert launch.assembly.count("wgmma.mma_async") == 8  # a stage of 128 of d_in by 16
    of_each = 5  # a map's weights; ways out for a whole part, and for 4, 2 and 1 rows of one
    assert launch.assembly.count("prefetch.tensormap") == 1 + 3 * of_each


@pytest.mark.long
def test_a_launch_whose_sums_fill_the_registers_shares_them_out():
    """As soon as a warpgroup has 128 x 128 sums; the one that copies gives its own away."""
    tight = GroupedMatmulConfig(columns=128, warpgroups=1, rows=128, stages=2, ctas=1)
    launch = lowered("mixtral-8x7b", 128, 1, None, biased=False, config=tight)
    assert (launch.grid, launch.threads) == ((132, 1, 1), 256)
    assert "setmaxnreg.dec.sync.aligned.u32 24;" in launch.assembly
    assert "setmaxnreg.inc.sync.aligned.u32 240;" in launch.assembly


# rows, padding, groups, d_out, d_in at real sizes: decode, uneven decode, prefill.
REAL = [
    ((512, 0, 128, 768, 2048), "uniform"),
    ((509, 3, 128, 2048, 768), "zipf"),
    ((16, 0, 128, 768, 2048), "uniform"),
    ((63, 1, 32, 2880, 2880), "uniform"),
    ((2048, 0, 8, 14336, 4096), "uniform"),
    ((8192, 0, 8, 4096, 14336), "skewed"),
    ((3001, 7, 64, 1408, 2048), "uniform"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "popularity"), REAL, ids=str)
def test_on_a_gpu_matches_float32(sizes, popularity):
    case = some_case(sizes, popularity)
    case = with_nan(case, sizes[0])
    call = jax.jit(pallas_gpu.grouped_matmul)
    got = call(*arrays(case))
    want = wanted(*arrays(case))
    np.testing.assert_allclose(wide(got), wide(want), **TOLERANCE["bfloat16"])
    assert not wide(got)[sizes[0] :].any()
    np.testing.assert_array_equal(
        wide(jax.jit(pallas_gpu.grouped_matmul)(*arrays(case))), wide(got)
    )


@pytest.mark.gpu
def test_on_a_gpu_a_row_has_the_same_bits_in_any_company():
    case = some_case((4096, 0, 8, 1024, 4096), "uniform")
    call = jax.jit(pallas_gpu.grouped_matmul)
    whole = wide(call(*arrays(case)))
    ends = np.cumsum(np.asarray(case.group_sizes))
    for group, row in ((0, 0), (3, int(ends[3]) - 1), (7, 4095)):
        sizes = jnp.zeros(8, jnp.int32).at[group].set(1)
        alone = call(case.x[row : row + 1], case.w, sizes, None)
        np.testing.assert_array_equal(wide(alone)[0], whole[row])


@pytest.mark.gpu
@pytest.mark.parametrize("d_out", [2048, 5120])
def test_on_a_gpu_a_dense_row_has_the_same_bits_at_any_number_of_rows(d_out):
    case = some_case((4096, 0, 1, d_out, 2048), "identical", bias=False)
    call = jax.jit(pallas_gpu.grouped_matmul)
    whole = wide(call(*arrays(case)))
    np.testing.assert_allclose(whole, wide(wanted(*arrays(case))), **TOLERANCE["bfloat16"])
    for rows in (1, 8, 33, 64, 300, 2048):
        some = call(case.x[-rows:], case.w, jnp.full(1, rows, jnp.int32), None)
        np.testing.assert_array_equal(wide(some), whole[-rows:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize(
    "sizes", [(512, 0, 128, 768, 2048), (61, 3, 64, 1408, 2048), (3001, 7, 8, 1024, 4096)], ids=str
)
def test_on_a_gpu_gate_and_up_have_the_bits_of_two_products(sizes, dtype):
    case = some_case(sizes, "uniform", bias=False)
    up, rows = case.w[:, ::-1], sizes[0]
    addends = some_addends(case, rows, 2, dtype) if dtype else ()
    args = (case.x, case.w, up, case.group_sizes)
    got = wide(jax.jit(pallas_gpu.gated_matmul)(*args, *addends))
    product = functools.partial(pallas_gpu.grouped_matmul)
    want = wide(jax.jit(functools.partial(composed.gated_matmul, product))(*args, *addends))
    np.testing.assert_array_equal(got, want)
    assert not got[rows:].any()
    plain = wide(jax.jit(pallas_gpu.gated_matmul)(*args))
    np.testing.assert_array_equal(got[:rows:3], plain[:rows:3])
    for a in addends[:1]:
        one = wide(jax.jit(pallas_gpu.grouped_matmul)(case.x, case.w, args[3], None, a))
        apart = functools.partial(composed.grouped_matmul, product)
        same = wide(jax.jit(apart)(case.x, case.w, args[3], None, a))
        np.testing.assert_array_equal(one, same)


@pytest.mark.parametrize(
    ("rows", "live", "widths", "config"),
    [
        (9, 7, (64, 128), SMALL),
        pytest.param(70, 41, (192, 64, 128), WIDE, marks=pytest.mark.long),
    ],
)
def test_maps_side_by_side_have_the_bits_of_each_alone(rows, live, widths, config):
    """Tiles of unequal widths, of which a last one is not full; rows behind the real ones."""
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 64)), jnp.bfloat16)
    weights = [jnp.asarray(rng.normal(size=(width, 64)), jnp.bfloat16) for width in widths]
    with interpreted() as interpret:
        options = {"config": config, "interpret": interpret}
        ys = pallas_gpu.joined_matmul(x, weights, jnp.int32(live), [None] * len(widths), **options)
        sizes = jnp.full(1, live, jnp.int32)
        wants = [pallas_gpu.grouped_matmul(x, w[None], sizes, None, **options) for w in weights]
        jax.block_until_ready((ys, wants))
    for y, want in zip(ys, wants, strict=True):
        np.testing.assert_array_equal(wide(y), wide(want))
        assert not wide(y)[live:].any()
