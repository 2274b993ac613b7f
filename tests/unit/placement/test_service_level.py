"""Equations 5 and 6, and times between measured batch sizes."""

import pytest

from lora_jax.placement.service_level import (
    LayerBudget,
    LayerTimes,
    Measurement,
    Profile,
    layer_budget,
    meets_latency,
    meets_throughput,
)

US = 1e-6
# EP4-PP2 in Table 4 of InfiniLoRA, batch 128 and 256.
AT_128 = LayerTimes(145 * US, 142 * US, 207 * US)
AT_256 = LayerTimes(246 * US, 204 * US, 396 * US)
PROFILE = Profile([Measurement(4, 256, AT_256), Measurement(4, 128, AT_128)])


def test_equation_5_is_the_sum():
    assert AT_128.total == pytest.approx(494 * US)
    assert meets_latency(AT_128, LayerBudget(layer=1.0, ffn=495 * US))
    assert not meets_latency(AT_128, LayerBudget(layer=1.0, ffn=493 * US))


def test_equation_6_is_the_slowest_times_the_instances():
    budget = LayerBudget(layer=4.5 * 207 * US, ffn=1.0)
    assert AT_128.slowest == 207 * US
    assert meets_throughput(AT_128, 4, budget)
    assert not meets_throughput(AT_128, 5, budget)


def test_the_budget_is_what_attention_leaves():
    got = layer_budget(tpot=0.1, layers=32, attention=1e-3, moe=0.5e-3)
    assert (got.layer, got.ffn) == pytest.approx((3.125e-3, 2.125e-3))


def test_a_base_model_that_is_too_slow_alone_is_refused():
    with pytest.raises(ValueError, match=r"needs 1100 us per layer.*leaves 1000"):
        layer_budget(tpot=0.032, layers=32, attention=0.6e-3, moe=0.5e-3)


def test_times_lie_on_the_line_between_measurements():
    assert PROFILE.degrees == (4,)
    assert PROFILE.times(4, 128.0) == AT_128
    assert PROFILE.times(4, 192.0).receive == pytest.approx((145 + 246) / 2 * US)
    assert PROFILE.times(4, 1.0) == AT_128  # rather too long than too short


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PROFILE.times(4, 257.0), "above the largest measured one of ep=4, 256"),
        (lambda: PROFILE.times(2, 128.0), "ep=2 was not measured"),
        (lambda: Profile([]), "at least one measurement"),
        (lambda: Profile([Measurement(4, 8, AT_128)] * 2), "two measurements of ep=4, batch=8"),
        (lambda: LayerTimes(-1.0, 0.0, 0.0), "receive must be seconds"),
        (lambda: LayerTimes(0.0, 0.0, float("inf")), "send must be seconds"),
    ],
)
def test_bad_input_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make()
