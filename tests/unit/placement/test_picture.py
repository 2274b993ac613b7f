"""The picture is compared whole: it is what a person reads."""

import pytest
from hypothesis import given, settings
from support.cases.placement_cases import layouts

from lora_jax.placement.ep_pp import ServerLayout
from lora_jax.placement.picture import picture, spell_bytes, spell_range
from lora_jax.placement.shape import AdapterShape

SHAPE = AdapterShape(adapters=3, layers=9, experts=8, unit_bytes=500_000)


def test_hybrid():
    assert picture(ServerLayout(SHAPE, ep=2, pp=2)).splitlines() == [
        "EP2-PP2 on 4 devices: 3 adapters x 9 layers x 8 experts, 36 MB per adapter",
        "                  | experts 0-3      | experts 4-7",
        "  layers 0,2,..,8 | device 0 (30 MB) | device 1 (30 MB)",
        "  layers 1,3,..,7 | device 2 (24 MB) | device 3 (24 MB)",
    ]


def test_data_parallel():
    assert picture(ServerLayout(SHAPE, dp=2)).splitlines() == [
        "DP2 on 2 devices: 3 adapters x 9 layers x 8 experts, 36 MB per adapter",
        "               | all layers, all experts",
        "  adapters 0,2 | device 0 (72 MB)",
        "  adapters 1   | device 1 (36 MB)",
    ]


@settings(max_examples=40, deadline=None)
@given(layout=layouts())
def test_every_device_is_drawn_once(layout):
    text = picture(layout)
    assert [text.count(f"device {d} (") for d in range(layout.devices)] == [1] * layout.devices


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (range(4), "0-3"),
        (range(5, 6), "5"),
        (range(1, 2, 4), "1"),
        (range(0, 6, 2), "0,2,4"),
        (range(1, 32, 2), "1,3,..,31"),
        (range(0), "none"),
    ],
)
def test_ranges(values, text):
    assert spell_range(values) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(12, "12 B"), (999, "999 B"), (1.81e9, "1.81 GB"), (2.5e12, "2.5 TB"), (4e15, "4000 TB")],
)
def test_bytes(number, text):
    assert spell_bytes(number) == text
