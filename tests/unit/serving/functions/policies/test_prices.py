"""Prices give the paper's table; shares of a backbone agree with counting every millisecond."""

import random

import pytest

from serving.functions.policies.prices import (
    Usage,
    always_on,
    cost_effectiveness,
    dollars,
    published_bill,
    share_backbone,
)


@pytest.mark.parametrize(
    ("cost", "gb"), [(20.93, 48.4), (42.96, 99.4), (7.32, 16.9), (11.40, 26.4)]
)
def test_engines_that_are_always_on_cost_what_table_1_says(cost, gb):
    assert dollars(always_on(gb, 4 * 3600)) == pytest.approx(cost, rel=0.003)


def test_each_unit_has_its_published_price():
    assert dollars(Usage(gpu_gb_idle_s=6)) == pytest.approx(dollars(Usage(gpu_gb_active_s=1)))
    assert dollars(Usage(vcpu_active_s=100)) == pytest.approx(0.002)
    assert dollars(Usage(memory_gb_s=100)) == pytest.approx(0.0003)
    assert dollars(Usage(calls=10_000)) == pytest.approx(0.0015)
    both = Usage(1, 2, 3, 4, 5) + Usage(10, 20, 30, 40, 50)
    assert both == Usage(11, 22, 33, 44, 55)


@pytest.mark.parametrize("seed", range(4))
def test_shares_of_a_backbone_agree_with_counting_milliseconds(seed):
    rng = random.Random(seed)
    busy = {}
    for name in "abc":
        marks = sorted(rng.sample(range(1, 2000), 6))
        busy[name] = [(marks[i] / 1000, marks[i + 1] / 1000) for i in (0, 2, 4)]
    counted, idle = dict.fromkeys(busy, 0.0), 0.0
    for tick in range(2000):
        moment = (tick + 0.5) / 1000
        on = [n for n, spans in busy.items() if any(a <= moment < b for a, b in spans)]
        for name in on:
            counted[name] += 13.5 / 1000 / len(on)
        idle += 0 if on else 13.5 / 1000
    shares = share_backbone(13.5, (0.0, 2.0), busy)
    assert shares.active == pytest.approx(counted)
    assert shares.idle == pytest.approx(idle)
    assert sum(shares.active.values()) + shares.idle == pytest.approx(27.0)


def test_back_to_back_spans_of_a_function_count_once():
    shares = share_backbone(1.0, (0, 3), {"a": [(0, 1), (1, 2)], "b": [(1, 2)]})
    assert shares.active == {"a": 1.5, "b": 0.5}
    assert shares.idle == 1.0


def test_impossible_numbers_are_refused():
    with pytest.raises(ValueError, match=r"a: span 1\.\.4 is not within 0\.\.3"):
        share_backbone(1.0, (0, 3), {"a": [(1, 4)]})
    with pytest.raises(ValueError, match="above 0"):
        cost_effectiveness(0.0, 1.0)
    assert cost_effectiveness(2.0, 4.0) == 0.125


# Table 1 of ServerlessLoRA: seconds end to end and dollars, Llama2-7B and 13B, by workload.
TABLE_1 = {
    "InstaInfer": [
        *((3.811, 24.32), (4.512, 32.68), (5.620, 24.73)),
        *((5.777, 53.30), (7.318, 51.46), (7.986, 36.58)),
    ],
    "ServerlessLLM": [
        *((3.807, 24.29), (4.569, 33.10), (5.168, 22.74)),
        *((4.733, 43.67), (5.690, 40.01), (6.474, 29.65)),
    ],
    "xLoRA": [
        *((2.922, 4.66), (3.061, 5.54), (3.050, 3.35)),
        *((3.166, 7.30), (3.338, 5.87), (3.631, 4.16)),
    ],
}


@pytest.mark.parametrize("column", range(6))
def test_the_published_costs_are_latencies_over_the_functions_that_share(column):
    sharing = {"xLoRA": 4}
    rates = []
    for system, cells in TABLE_1.items():
        seconds, cost = cells[column]
        rates.append(cost / published_bill(seconds, sharing.get(system, 1)))
    assert max(rates) / min(rates) < 1.004
