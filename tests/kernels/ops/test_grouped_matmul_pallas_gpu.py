"""Grouped matmul in Mosaic GPU: interpreted on a CPU, lowered for CUDA, and run where there is one.

On a GPU: JAX_PLATFORMS=cuda PYTHONPATH=src:tests:. python3 -m pytest --noconftest -m gpu FILE
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support.doubles.mosaic import interpreted
from support.drivers.lowering import launches
from support.oracles.tolerance import TOLERANCE

from lora_jax.ops import hopper, tuning_table
from lora_jax.ops.cases import MODELS, GroupedCase, grouped_case
from lora_jax.ops.grouped_matmul import composed, pallas_gpu, reference
from lora_jax.ops.grouped_matmul._gpu_tiles import (
    GroupedMatmulConfig,
    depths,
    find_config,
    fitted,
    with_stages,
)

SMALL = GroupedMatmulConfig(columns=64, warpgroups=1, rows=16, stages=2, ctas=1)
# Two warpgroups, of which the second has no columns in the last tile; two parts on the way out.
WIDE = GroupedMatmulConfig(columns=64, warpgroups=2, rows=64, stages=3, ctas=1)
# Three parts on the way out, of which the third takes the place of the first.
PARTS = GroupedMatmulConfig(columns=64, warpgroups=1, rows=48, stages=2, ctas=1)
TALL = GroupedMatmulConfig(columns=128, warpgroups=1, rows=8, stages=4, ctas=2)
# Half as many stages, each of twice as much of d_in.
DEEP = GroupedMatmulConfig(columns=64, warpgroups=1, rows=16, stages=2, ctas=1, step=128)
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


def some_case(sizes: tuple[int, ...], popularity: str, **options) -> GroupedCase:
    """Return a bfloat16 case; with a bias where the number of rows is odd."""
    rows, padding, groups, d_out, d_in = sizes
    options = {"dtype": "bfloat16", "padding": padding, "bias": rows % 2 == 1, **options}
    return grouped_case(rows, groups, d_out, d_in, popularity=popularity, **options)


def with_nan(case: GroupedCase, rows: int) -> GroupedCase:
    """Return the case with NaN in the rows that are in no group."""
    x = np.array(case.x)
    x[rows:] = np.nan
    return dataclasses.replace(case, x=jnp.asarray(x))


def arrays(case: GroupedCase) -> tuple:
    return case.x, case.w, case.group_sizes, case.bias


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


def some_addends(case: GroupedCase, rows: int, count: int, dtype: str) -> tuple[jax.Array, ...]:
    """Return random addends of which every third row is 0, and rows in no group are NaN."""
    rng = np.random.default_rng(3)
    shape = (case.x.shape[0], case.w.shape[1])
    some = [np.array(rng.standard_normal(shape), np.float32) for _ in range(count)]
    for array in some:
        array[::3] = 0
        array[rows:] = np.nan
    return tuple(jnp.asarray(a.astype(jnp.dtype(dtype))) for a in some)


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


@pytest.mark.parametrize("addend_size", [0, 2, 4])
@pytest.mark.parametrize("matrices", [1, 2])
@pytest.mark.parametrize("rows", [1, 8, 64, 512, 4096, 65536])
@pytest.mark.parametrize("groups", [1, 8, 64, 512])
def test_tiles_fit_the_shared_memory(rows, groups, matrices, addend_size):
    config = find_config(rows, groups, 2048, matrices)
    config = with_stages(config, matrices, addend_size) if addend_size else config
    deep, part = depths(config, matrices, addend_size), config.part_bytes()
    took = config.stages * config.stage_bytes(matrices) + (deep.results + 1) * part
    took += deep.addends * matrices * part // 2 * addend_size
    assert config.stages >= 3 or addend_size == 4
    assert config.stages >= 2
    assert min(2, config.parts) <= deep.results <= config.parts
    assert (deep.addends >= min(2, config.parts)) == (addend_size > 0)
    assert config.ctas * (took + 1024) <= 227 * 1024
    # The sums of all matrices have to fit the registers of a warpgroup's 128 threads.
    assert matrices * config.columns * config.rows // 128 <= 192


@pytest.fixture
def chosen(monkeypatch):
    """The tiles of every launch, which are not made."""
    found = []

    def launch(x, weights, sizes, num_rows, biases, addends, num_added, config, *settings):
        found.append(config)
        return jnp.zeros((x.shape[0], weights[0].shape[1]), x.dtype)

    monkeypatch.setattr(pallas_gpu, "_launch", launch)
    return found


def test_the_table_of_this_device_decides_while_tracing(chosen, tmp_path, monkeypatch):
    """At the shape nearest to those that were tuned; the formula does where none is near."""
    kind = tuning_table.device_folder(jax.devices()[0].device_kind)
    shape = {"rows": 64, "groups": 4, "d_out": 128, "d_in": 64}
    (tmp_path / kind).mkdir()
    for op, config in (("grouped_matmul", TALL), ("gated_matmul", WIDE)):
        entries = [{"shape": shape, "config": dataclasses.asdict(config)}]
        (tmp_path / kind / f"{op}.json").write_text(json.dumps({"entries": entries}))
    monkeypatch.setattr(tuning_table, "TABLES", tmp_path)
    for rows in (64, 108, 512):
        case = some_case((rows, 0, 4, 128, 64), "uniform", bias=False)
        pallas_gpu.grouped_matmul(*arrays(case), interpret=False)
        args = (case.x, case.w, case.w, case.group_sizes)
        pallas_gpu.gated_matmul(*args, interpret=False)
    tuning_table.read.cache_clear()
    assert chosen[:4] == [TALL, WIDE] * 2
    assert chosen[4:] == [find_config(512, 4, 128, matrices) for matrices in (1, 2)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_leave_room_for_addends(chosen, dtype, monkeypatch):
    crowded = GroupedMatmulConfig(columns=128, warpgroups=2, rows=192, stages=3, ctas=1)
    monkeypatch.setattr(tuning_table, "find", lambda op, shape, kind: crowded)
    case = some_case((192, 0, 2, 128, 64), "uniform", bias=False)
    adds = some_addends(case, 192, 2, dtype)
    pallas_gpu.grouped_matmul(*arrays(case), adds[0], interpret=False)
    pallas_gpu.gated_matmul(case.x, case.w, case.w, case.group_sizes, *adds, interpret=False)
    # Two matrices' sums and two float32 addends are too much for tiles of 256 columns.
    gated = {"bfloat16": (128, 80), "float32": (64, 64)}[dtype]
    assert [(c.columns, c.rows) for c in chosen] == [(128, 160), gated]
    for matrices, config in enumerate(chosen, 1):
        deep = depths(config, matrices, adds[0].dtype.itemsize)
        took = config.stages * config.stage_bytes(matrices)
        took += (deep.results + 1) * config.part_bytes()
        took += deep.addends * matrices * config.part_bytes() // 2 * adds[0].dtype.itemsize
        assert config.stages >= 2
        assert config.ctas * (took + 1024) <= 227 * 1024


def test_a_guess_beside_addends_has_a_step_that_divides_d_in(chosen, monkeypatch):
    """The formula says stages of 256 for few rows of one group; what is left of d_in is lost."""
    crowded = GroupedMatmulConfig(columns=128, warpgroups=2, rows=16, stages=1, ctas=2, step=128)
    monkeypatch.setattr(tuning_table, "find", lambda op, shape, kind: crowded)
    case = some_case((8, 0, 1, 128, 640), "uniform", bias=False)
    (addend,) = some_addends(case, 8, 1, "bfloat16")
    pallas_gpu.grouped_matmul(*arrays(case), addend, interpret=False)
    assert find_config(8, 1, 128).step == 256
    assert [(c.columns, c.step) for c in chosen] == [(64, 64)]


def test_more_rows_per_group_take_wider_tiles():
    tiles = [find_config(rows, 128, 768).rows for rows in (64, 512, 1024, 4096, 16384, 131072)]
    assert tiles == [8, 16, 32, 64, 144, 176]
    # Six tiles of 176 hold 1024 rows and a bit, where 192 would be empty by an eighth; four of 192
    # hold as many of 720 as six of 128, which have more stages.
    assert [find_config(8 * mean, 8, 14336).rows for mean in (720, 1024, 1120)] == [128, 176, 176]


def test_a_dense_layer_takes_long_tiles_only_if_they_fill_the_device():
    shapes = ((8, 5120), (33, 2048), (64, 151936), (512, 5120), (4096, 5120))
    tiles = [find_config(rows, 1, d_out) for rows, d_out in shapes]
    assert [tile.rows for tile in tiles] == [8, 64, 64, 64, 128]
    assert [tile.ctas for tile in tiles] == [1, 1, 2, 2, 1]
    assert [tile.step for tile in tiles] == [256, 128, 64, 64, 64]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "float32"}, "bfloat16, not float32"),
        ({"sizes": (4, 0, 3, 64, 72)}, "d_in in steps of 64"),
        ({"sizes": (4, 0, 3, 68, 64)}, "d_out in steps of 8"),
        ({"sizes": (4, 0, 3, 96, 64)}, "d_out above 64 in steps of it, not 96"),
        ({"sizes": (0, 0, 1, 64, 64)}, "not 0 and 1"),
    ],
)
def test_declines_what_it_cannot_serve(change, why):
    case = some_case(
        change.get("sizes", (4, 0, 3, 64, 64)), "uniform", dtype=change.get("dtype", "bfloat16")
    )
    with pytest.raises(NotImplementedError, match=why):
        pallas_gpu.grouped_matmul(*arrays(case), interpret=False)


def test_declines_on_a_machine_without_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(NotImplementedError, match="cannot run on cpu"):
        pallas_gpu.grouped_matmul(*arrays(some_case((4, 0, 3, 64, 64), "uniform")))


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


def test_maps_side_by_side_take_no_bias():
    x, w = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((64, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="joined_matmul on Mosaic GPU takes no bias"):
        pallas_gpu.joined_matmul(x, [w, w], jnp.int32(8), [None, jnp.zeros(64, jnp.bfloat16)])


def test_a_config_whose_step_leaves_a_rest_is_refused():
    case = some_case((16, 0, 2, 128, 192), "uniform", bias=False)
    with pytest.raises(ValueError, match="step of 128 must divide d_in, which is 192"):
        pallas_gpu.grouped_matmul(*arrays(case), config=DEEP, interpret=False)


def test_tiles_of_another_shape_are_made_fit():
    """Of a table's nearest shape with more rows, and a step that does not divide this d_in."""
    long = with_stages(GroupedMatmulConfig(64, 1, 128, 1, 1, step=256), 1)
    assert fitted(long, 128, 512, 1) == long
    short = fitted(long, 37, 512, 1)
    assert (short.rows, short.step) == (48, 256)
    assert short.stages > long.stages
    narrow = fitted(long, 128, 320, 1)
    assert (narrow.rows, narrow.step) == (128, 64)
    assert narrow.stages > long.stages


@pytest.mark.parametrize("rows", [8, 32, 64])
def test_one_cta_on_an_sm_has_deeper_stages_than_two(rows):
    """It runs where tiles are fewer than SMs: its loads must cover the part of the idle ones."""
    alone, two = (with_stages(GroupedMatmulConfig(64, 1, rows, 1, n), 1) for n in (1, 2))
    assert two.stages <= 8 < alone.stages <= 24
    taken = alone.stages * alone.stage_bytes(1) + (alone.parts + 1) * alone.part_bytes()
    assert taken <= hopper.SHARED_BYTES


def test_joined_maps_have_the_tiles_of_one_map_of_their_width(monkeypatch):
    asked = []

    def find(op, shape, config):
        asked.append((op, shape))
        raise InterruptedError

    monkeypatch.setattr(tuning_table, "find", find)
    x, widths = jnp.zeros((8, 64), jnp.bfloat16), (64, 128, 192)
    weights = [jnp.zeros((width, 64), jnp.bfloat16) for width in widths]
    with pytest.raises(InterruptedError):
        pallas_gpu.joined_matmul(x, weights, jnp.int32(8), [None] * 3, interpret=True)
    shape = {"rows": 8, "groups": 1, "d_out": sum(widths), "d_in": 64}
    assert asked == [("grouped_matmul", shape)]
