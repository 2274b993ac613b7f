"""The simulation of few slots: fewer rows a step, and loads that cost next to nothing."""

import dataclasses

from bench.slot_rows import Case, measure, simulate

SMALL = Case(adapters=12, at_once=8, requests=16)


def test_few_slots_leave_rows_idle_and_loads_do_not():
    found = measure(SMALL, [3], seeds=2)["slots"]
    assert found[3]["rows"] < 0.8 * found[12]["rows"]
    assert found[3]["of_all_resident"] < 0.8
    assert found[12]["of_all_resident"] == 1.0
    at_once = simulate(dataclasses.replace(SMALL, load_s=0.0), 3, seed=0)
    late = simulate(dataclasses.replace(SMALL, load_s=0.02), 3, seed=0)
    assert 0.9 < late["tokens_per_s"] / at_once["tokens_per_s"] <= 1.0
    assert late["loads"] > 6
