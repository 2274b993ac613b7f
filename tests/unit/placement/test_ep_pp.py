"""Placement of every unit, counted one by one, and impossible layouts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases.placement_cases import layouts

from lora_jax.placement.ep_pp import (
    ServerLayout,
    data_parallel,
    expert_parallel,
    from_text,
    hybrid,
    pipeline_parallel,
    possible_degrees,
)
from lora_jax.placement.shape import AdapterShape

SHAPE = AdapterShape(adapters=3, layers=4, experts=8, unit_bytes=10)


def units(shape: AdapterShape):
    return itertools.product(range(shape.adapters), range(shape.layers), range(shape.experts))


@settings(max_examples=60, deadline=None)
@given(layout=layouts())
def test_every_unit_lies_on_exactly_one_device(layout):
    held = [
        set(itertools.product(layout.adapters_of(d), layout.layers_of(d), layout.experts_of(d)))
        for d in range(layout.devices)
    ]
    for unit in units(layout.shape):
        assert [d for d in range(layout.devices) if unit in held[d]] == [layout.device_of(*unit)]
        assert layout.device_of(*unit) in layout.group_of(unit[1])
        assert layout.devices_of_layer(unit[1])[unit[0], unit[2]] == layout.device_of(*unit)
    assert layout.bytes_per_device == tuple(len(part) * layout.shape.unit_bytes for part in held)


@settings(max_examples=60, deadline=None)
@given(layout=layouts())
def test_a_device_holds_a_block_of_adapters_layers_and_experts(layout):
    held = {device: [] for device in range(layout.devices)}
    for unit in units(layout.shape):
        held[layout.device_of(*unit)].append(unit)
    for device, mine in held.items():
        block = (layout.adapters_of(device), layout.layers_of(device), layout.experts_of(device))
        assert sorted(mine) == list(itertools.product(*block))


@settings(max_examples=60, deadline=None)
@given(layout=layouts())
def test_devices_are_balanced(layout):
    """No device has more than one adapter or one layer more than another."""
    shape = layout.shape
    step = shape.adapter_bytes if layout.dp > 1 else shape.adapters * layout.experts_per_device
    step *= 1 if layout.dp > 1 else shape.unit_bytes
    assert max(layout.bytes_per_device) - min(layout.bytes_per_device) in (0, step)
    assert sum(layout.bytes_per_device) == shape.adapters * shape.adapter_bytes


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), room=st.integers(1, 5000))
def test_capacity_is_the_most_adapters_that_fit(layout, room):
    fits = layout.capacity(room)

    def heaviest(adapters: int) -> int:
        shape = AdapterShape(
            adapters, layout.shape.layers, layout.shape.experts, layout.shape.unit_bytes
        )
        return max(ServerLayout(shape, layout.ep, layout.pp, layout.dp).bytes_per_device)

    if fits >= max(layout.dp, 1):
        assert heaviest(fits) <= room < heaviest(fits + 1)
    else:
        assert fits == 0
        assert heaviest(layout.dp) > room


def test_layers_alternate_as_in_figure_8d():
    layout = hybrid(SHAPE, ep=2, pp=2, devices=4)
    assert [list(layout.group_of(layer)) for layer in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert list(layout.layers_of(2)) == [1, 3]
    assert list(layout.experts_of(3)) == [4, 5, 6, 7]


@settings(max_examples=60, deadline=None)
@given(layout=layouts(), ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
def test_ranks_and_servers_agree_on_who_talks_to_whom(layout, ranks):
    experts = layout.shape.experts
    if experts % ranks or (layout.dp == 1 and layout.ep % ranks and ranks % layout.ep):
        with pytest.raises(ValueError, match=r"split evenly|line up"):
            layout.require_aligned(ranks)
        return
    for layer in range(layout.shape.layers):
        talks = {
            (expert * ranks // experts, layout.device_of(adapter, layer, expert))
            for adapter in range(layout.shape.adapters)
            for expert in range(experts)
        }
        by_rank = {(r, d) for r in range(ranks) for d in layout.servers_of_rank(layer, r, ranks)}
        assert by_rank == talks
        group = layout.group_of(layer)
        assert {(r, d) for d in group for r in layout.ranks_of_server(d, ranks)} == talks


def test_as_many_ranks_as_shards_talk_to_one_server_each():
    layout = hybrid(SHAPE, ep=4, pp=2, devices=8)
    assert [list(layout.servers_of_rank(1, rank, 4)) for rank in range(4)] == [[4], [5], [6], [7]]
    assert [list(layout.servers_of_rank(1, rank, 8)) for rank in (0, 1, 7)] == [[4], [4], [7]]


def test_the_four_strategies():
    assert data_parallel(SHAPE, 3).name == "DP3"
    assert expert_parallel(SHAPE, 8).name == "EP8-PP1"
    assert pipeline_parallel(SHAPE, 4).name == "EP1-PP4"
    assert hybrid(SHAPE, 4, 2, 8).name == "EP4-PP2"
    np.testing.assert_array_equal(data_parallel(SHAPE, 3).devices_of_layer(2)[:, 0], [0, 1, 2])


def test_pipeline_groups_as_few_devices_as_can_hold_a_layer():
    shape = AdapterShape(adapters=3, layers=5, experts=8, unit_bytes=10)
    needs = {"EP1-PP4": 2 * 8 * 30, "EP2-PP2": 3 * 4 * 30, "EP4-PP1": 5 * 2 * 30}
    assert pipeline_parallel(shape, 4, 480).name == "EP1-PP4"
    assert pipeline_parallel(shape, 4, 479).name == "EP2-PP2"
    assert pipeline_parallel(shape, 4, 359).name == "EP4-PP1"
    assert [max(from_text(n, shape, 4).bytes_per_device) for n in needs] == list(needs.values())
    assert pipeline_parallel(SHAPE, 8, 120).name == "EP2-PP4"  # more devices than layers
    with pytest.raises(ValueError, match=r"device of EP4-PP1.*hold at most 2.*more devices"):
        pipeline_parallel(shape, 4, 299)
    with pytest.raises(ValueError, match="4 layers cannot fill pp=5 stages"):
        pipeline_parallel(SHAPE, 5, 240)


@pytest.mark.parametrize(
    ("text", "devices", "name"),
    [
        ("ep4-pp2", 8, "EP4-PP2"),
        ("EP2-PP1", 2, "EP2-PP1"),
        ("ep8", 8, "EP8-PP1"),
        ("pp4", 4, "EP1-PP4"),
        ("dp3", 3, "DP3"),
    ],
)
def test_placements_by_name(text, devices, name):
    assert from_text(text, SHAPE, devices).name == name


@pytest.mark.parametrize("text", ["", "ep4pp2", "ep4-", "-pp2", "ep", "tp2", "ep-1", "ep2-pp2-dp1"])
def test_other_names_are_refused(text):
    with pytest.raises(ValueError, match="written ep4-pp2"):
        from_text(text, SHAPE, 4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: hybrid(SHAPE, 3, 2, 8), r"needs 6 devices and there are 8.*ep2-pp4"),
        (lambda: from_text("dp3", SHAPE, 2), "use dp2"),
        (lambda: ServerLayout(SHAPE, ep=3), "choose ep from 1, 2, 4, 8"),
        (lambda: ServerLayout(SHAPE, pp=5), "at most 4 stages"),
        (lambda: ServerLayout(SHAPE, dp=4), "use at most 3"),
        (lambda: ServerLayout(SHAPE, dp=2, ep=2), "use ep=1, pp=1"),
        (lambda: ServerLayout(SHAPE, ep=0), "ep must be"),
        (lambda: from_text("ep0-pp0", SHAPE, 0), "pp must be|ep must be"),
        (lambda: hybrid(SHAPE, 4, 2, 8).require_memory(39), r"needs 40 bytes.*lower rank"),
        (lambda: hybrid(SHAPE, 4, 2, 8).require_memory(119), "hold at most 2"),
        (lambda: ServerLayout(SHAPE).device_of(3, 0, 0), r"adapter must be in \[0, 3\)"),
        (lambda: ServerLayout(SHAPE).device_of(0, 0, -1), r"expert must be in \[0, 8\)"),
        (lambda: ServerLayout(SHAPE).group_of(4), r"layer must be in \[0, 4\)"),
        (lambda: ServerLayout(SHAPE, ep=2).layers_of(2), r"device must be in \[0, 2\)"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_change(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_enough_memory_passes():
    hybrid(SHAPE, 4, 2, 8).require_memory(120)


def test_possible_degrees():
    assert possible_degrees(SHAPE, 8) == [(2, 4), (4, 2), (8, 1)]
    assert possible_degrees(SHAPE, 9) == []
