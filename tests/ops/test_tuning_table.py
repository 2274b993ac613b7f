"""The table gives the nearest shape's tiling, and nothing where none is near."""

import dataclasses
import json

import pytest

from lora_jax.ops import tuning_table


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
