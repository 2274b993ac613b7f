"""Tiles of the Mosaic kernel of grouped products: by table, by guess, and what is declined."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from support.cases.grouped_matmul_cases import DEEP, TALL, WIDE, arrays, some_addends, some_case

from lora_jax.ops import hopper, tuning_table
from lora_jax.ops.grouped_matmul import pallas_gpu
from lora_jax.ops.grouped_matmul._gpu_tiles import (
    GroupedMatmulConfig,
    depths,
    find_config,
    fitted,
    with_stages,
)


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
