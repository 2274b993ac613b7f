"""The fewest devices, against trying every number and layout by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_jax.placement.devices import Instances, minimum_devices
from lora_jax.placement.ep_pp import ServerLayout, possible_degrees
from lora_jax.placement.service_level import LayerBudget, LayerTimes, Measurement, Profile
from lora_jax.placement.shape import AdapterShape

SHAPE = AdapterShape(adapters=10, layers=4, experts=8, unit_bytes=1)  # 320 bytes
AMPLE = LayerBudget(layer=1.0, ffn=1.0)


def profile(**microseconds: float) -> Profile:
    """A profile of x = N from epN=T: receive, LoRA and send take T each, at batch 64."""
    return Profile(
        Measurement(int(name[2:]), 64, LayerTimes(*[time * 1e-6] * 3))
        for name, time in microseconds.items()
    )


def find(device_bytes, *, count=1, ranks=1, times=None, budget=AMPLE, most=16) -> str:
    times = times or profile(ep1=40.0, ep2=30.0, ep4=20.0, ep8=25.0)
    instances = Instances(count, ranks, 64.0)
    return minimum_devices(SHAPE, device_bytes, instances, times, budget, most).name


@pytest.mark.parametrize(
    ("device_bytes", "name"),
    [(320, "EP1-PP1"), (319, "EP2-PP1"), (159, "EP4-PP1"), (79, "EP4-PP2"), (39, "EP4-PP4")],
)
def test_memory_sets_the_number_and_measurements_the_layout(device_bytes, name):
    assert find(device_bytes) == name


def test_equation_5_asks_for_a_faster_layout_than_memory_does():
    assert find(1000, budget=LayerBudget(layer=1.0, ffn=100e-6)) == "EP2-PP1"
    assert find(1000, budget=LayerBudget(layer=1.0, ffn=61e-6)) == "EP4-PP1"


def test_equation_6_does_too():
    assert find(1000, count=5, budget=LayerBudget(layer=101e-6, ffn=1.0)) == "EP4-PP1"


def test_only_shards_that_line_up_with_the_instances():
    assert find(1000, ranks=2, times=profile(ep1=40.0)) == "EP1-PP1"
    with pytest.raises(ValueError, match=r"No measured x of \(3,\) lines up.*2 devices"):
        find(1000, ranks=2, times=profile(ep3=40.0))


@settings(max_examples=40, deadline=None)
@given(
    device_bytes=st.integers(20, 400),
    times=st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.integers(10, 60), min_size=1),
    ffn=st.integers(30, 150),
    layer=st.integers(30, 150),
    count=st.integers(1, 4),
)
def test_no_smaller_number_would_do(device_bytes, times, ffn, layer, count):
    def works(layout: ServerLayout) -> bool:
        time = times.get(layout.ep, 1e9)
        quick = 3 * time <= ffn + 1e-6 and time * count <= layer + 1e-6
        return quick and max(layout.bytes_per_device) <= device_bytes

    everything = [
        ServerLayout(SHAPE, ep=x, pp=y) for m in range(1, 17) for x, y in possible_degrees(SHAPE, m)
    ]
    good = [layout for layout in everything if works(layout)]
    measured = profile(**{f"ep{x}": float(time) for x, time in times.items()})
    budget = LayerBudget(layer=layer * 1e-6 + 1e-12, ffn=ffn * 1e-6 + 1e-12)
    if not good:
        with pytest.raises(ValueError, match=r"Eq. 5|Eq. 6|at most 16 devices"):
            find(device_bytes, count=count, times=measured, budget=budget)
        return
    fewest = min(layout.devices for layout in good)
    same = [layout for layout in good if layout.devices == fewest]
    best = min(same, key=lambda layout: (times[layout.ep], -layout.ep))
    assert find(device_bytes, count=count, times=measured, budget=budget) == best.name


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: find(9),
            r"10 adapters of 32 bytes fill 35.6 devices.*most 16 devices.*lower rank",
        ),
        (
            lambda: find(999, budget=LayerBudget(1.0, 50e-6)),
            r"Eq. 5.*60 us at best \(ep=4\).*50 us",
        ),
        (lambda: find(999, count=9, budget=LayerBudget(1e-4, 1.0)), "Eq. 6: 9 instances at 20 us"),
        (lambda: find(999, ranks=3), "8 experts cannot be split evenly over an instance's 3"),
        (lambda: Instances(0, 1, 1.0), "at least one instance"),
        (lambda: Instances(1, 1, -1.0), "a batch from 0"),
    ],
)
def test_what_no_number_meets_is_refused_by_name(make, says):
    with pytest.raises(ValueError, match=says):
        make()
