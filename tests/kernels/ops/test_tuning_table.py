"""The table gives the nearest shape's tiling, and nothing where none is near."""

import dataclasses
import functools
import json

import pytest

from lora_jax.ops import hopper, tuning_table
from lora_jax.ops.grouped_matmul import _gpu_tiles
from lora_jax.ops.lora_gemm import _gpu_schedule
from lora_jax.ops.tuning_programs import OPS, find_tunable
from lora_jax.ops.tuning_table import TABLES, device_folder


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int


@pytest.fixture
def table(tmp_path, monkeypatch):
    entries = [
        {"shape": {"rows": 16, "d_in": 2048}, "config": {"tile": 8}},
        {"shape": {"rows": 256, "d_in": 2048}, "config": {"tile": 64}},
        {"shape": {"rows": 256, "d_in": 4096}, "config": {"tile": 128}},
    ]
    folder = tmp_path / "made_up_chip"
    folder.mkdir()
    (folder / "op.json").write_text(json.dumps({"entries": entries}))
    monkeypatch.setattr(tuning_table, "TABLES", tmp_path)
    yield
    tuning_table.read.cache_clear()


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("rows", "d_in", "tile"),
    [
        (16, 2048, 8),
        (30, 2048, 8),
        (200, 2048, 64),
        (256, 4000, 128),
        (512, 2048, 64),
        (60, 2048, None),  # more than twice 16, less than half of 256
        (256, 1000, None),
    ],
)
def test_the_nearest_shape_decides(rows, d_in, tile):
    shape = {"rows": rows, "d_in": d_in}
    found = tuning_table.find("op", shape, Config, device="Made Up  Chip")
    assert found == (None if tile is None else Config(tile))


@pytest.mark.usefixtures("table")
def test_other_sizes_other_ops_and_other_devices_have_no_entry():
    shape = {"rows": 16, "d_in": 2048}
    assert tuning_table.find("op", {"rows": 16}, Config, device="made up chip") is None
    assert tuning_table.find("other", shape, Config, device="made up chip") is None
    assert tuning_table.find("op", shape, Config, device="another chip") is None
    assert tuning_table.find("op", shape, Config) is None  # this machine's device


COMMITTED = sorted(TABLES.glob("*/*.json"))


def test_there_are_tables():
    assert {path.stem for path in COMMITTED if path.parent.name == "nvidia_h200"} == {*OPS}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_a_committed_table_gives_its_own_shapes_and_those_near_them(path):
    table, kind = json.loads(path.read_text()), config_of(path.stem)
    assert device_folder(table["device"]) == path.parent.name
    look_up = functools.partial(tuning_table.find, path.stem, device=table["device"])
    for entry in table["entries"]:
        assert entry["us"] == min(t["us"] for t in entry["times"])
        found = look_up(entry["shape"], kind)
        assert found == kind(**entry["config"])
        near = {**entry["shape"], "rows": entry["shape"]["rows"] * 5 // 4}
        assert look_up(near, kind) == found
        far = {**entry["shape"], "d_in": entry["shape"]["d_in"] * 1000}
        assert look_up(far, kind) is None


def config_of(op: str) -> type:
    """Return the class of an op's tilings."""
    tunable = find_tunable(op)
    return type(next(iter(tunable.candidates(tunable.shapes[0]))))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_tilings_fit_the_device(path):
    kind = config_of(path.stem)
    for entry in json.loads(path.read_text())["entries"]:
        config = kind(**entry["config"])
        if path.stem == "lora_gemm":
            for took in lora_bytes(config, entry["shape"]["rank"]):
                assert _gpu_schedule.CTAS * (took + 1024) <= hopper.SHARED_BYTES
        else:
            matrices = 2 if path.stem == "gated_matmul" else 1
            assert config.ctas * (product_bytes(config, matrices) + 1024) <= hopper.SHARED_BYTES
            assert matrices * config.columns * config.rows // 128 <= 192


def product_bytes(config: _gpu_tiles.GroupedMatmulConfig, matrices: int) -> int:
    """Return the shared memory that a CTA of a product takes."""
    deep = _gpu_tiles.depths(config, matrices)
    return config.stages * config.stage_bytes(matrices) + (deep.results + 1) * config.part_bytes()


def lora_bytes(config: _gpu_schedule.LoraGemmConfig, rank: int) -> tuple[int, int]:
    """Return the shared memory that a CTA takes of the shrink and of the expand."""
    stage = (_gpu_schedule.TALL + config.rows) * _gpu_schedule.DEPTH * 2
    wide = config.columns * config.warpgroups
    work = config.rows * (wide + _gpu_schedule.rank_steps(rank) * _gpu_schedule.STEP) * 2
    shrink = config.shrink_stages * stage + config.rows * _gpu_schedule.TALL * 4
    return shrink, config.expand_stages * _gpu_schedule.STEP * wide * 2 + config.slots * work


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_tilings_are_still_searched(path):
    """What the kernel no longer has, or has with other stages, was measured of another kernel."""
    tunable, kind = find_tunable(path.stem), config_of(path.stem)
    for entry in json.loads(path.read_text())["entries"]:
        known = [*tunable.candidates(entry["shape"])]
        assert kind(**entry["config"]) in known, entry["shape"]
