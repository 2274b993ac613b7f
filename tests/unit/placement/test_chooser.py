"""The default and the measured choice of x and y."""

import pytest

from lora_jax.placement.chooser import cheapest_placement, default_placement
from lora_jax.placement.shape import AdapterShape

MIXTRAL = AdapterShape(adapters=4, layers=32, experts=8, unit_bytes=1)
# Table 4 of InfiniLoRA: receive, LoRA, send in microseconds at batch 128 and 256, 8 devices.
TABLE_4 = {
    1: ((243, 342, 384), (527, 526, 734)),
    2: ((155, 212, 221), (279, 315, 402)),
    4: ((145, 142, 207), (246, 204, 396)),
    8: ((173, 163, 255), (310, 205, 441)),
}


@pytest.mark.parametrize(
    ("devices", "per_host", "name"),
    [
        (8, 4, "EP4-PP2"),
        (8, 8, "EP8-PP1"),
        (4, 8, "EP4-PP1"),
        (6, 4, "EP2-PP3"),  # 3 and 6 do not divide 8 experts
        (1, 4, "EP1-PP1"),
    ],
)
def test_default_is_a_host_per_layer(devices, per_host, name):
    assert default_placement(MIXTRAL, devices, per_host).name == name


def test_default_without_a_group_inside_a_host_is_refused():
    shallow = AdapterShape(adapters=1, layers=1, experts=8, unit_bytes=1)
    with pytest.raises(ValueError, match=r"at most 4 devices per layer.*smallest is 8"):
        default_placement(shallow, 8, 4)


@pytest.mark.parametrize("batch", [0, 1])
def test_table_4_leads_to_the_papers_choice(batch):
    seconds = {x: sum(rows[batch]) * 1e-6 for x, rows in TABLE_4.items()}
    assert cheapest_placement(MIXTRAL, 8, seconds).name == "EP4-PP2"


def test_only_possible_x_are_taken_and_the_larger_of_equal_ones():
    assert cheapest_placement(MIXTRAL, 6, {2: 2.0, 3: 0.1, 6: 0.1, 1: 3.0}).name == "EP2-PP3"
    assert cheapest_placement(MIXTRAL, 8, {2: 1.0, 4: 1.0, 8: 2.0}).name == "EP4-PP2"


def test_nothing_possible_is_refused():
    with pytest.raises(ValueError, match=r"possible x are 1, 2, measured are 4, 8"):
        cheapest_placement(MIXTRAL, 2, {4: 1.0, 8: 1.0})
    with pytest.raises(ValueError, match="use another number of devices"):
        cheapest_placement(MIXTRAL, 37, {1: 1.0})
