"""The part of a step's time that its rows do not cause."""

import random

import pytest

from serving.scheduling.step_times import StepTimes


@pytest.mark.parametrize(("fixed", "row"), [(0.004, 0.0), (0.004, 0.0005), (0.002, 0.0001)])
def test_the_fixed_part_is_found_under_noise_and_followed_when_it_changes(fixed, row):
    rng, times = random.Random(1), StepTimes()
    for change in (1.0, 2.0):
        for _ in range(600):
            rows = rng.randrange(2, 40)
            times.note(rows, (fixed * change + rows * row) * rng.uniform(0.95, 1.05))
        assert times.fixed_s == pytest.approx(fixed * change, rel=0.35, abs=0.0006)


def test_without_a_spread_of_rows_all_of_a_step_counts():
    times = StepTimes()
    assert times.fixed_s == 0.0
    for _ in range(10):
        times.note(8, 0.01)
    assert times.fixed_s == pytest.approx(0.01)


def test_it_is_an_eighth_of_a_step_at_least_and_never_more_than_all():
    times = StepTimes()
    for rows, seconds in ((2, 0.001), (10, 0.1), (2, 0.001), (10, 0.1)):
        times.note(rows, seconds)
    assert times.fixed_s == pytest.approx(0.0505 / 8)
    for _ in range(200):
        times.note(2, 0.1), times.note(10, 0.001)
    assert times.fixed_s == pytest.approx(0.0505, rel=0.05)


def test_until_a_step_without_prompts_has_run_an_eighth_of_the_others_counts():
    times = StepTimes()
    for seconds in (0.4, 0.8, 0.8):
        times.note_other(seconds)
    assert 0.4 / 8 < times.fixed_s < 0.8 / 8
    times.note(4, 0.02)
    times.note_other(0.8)
    assert times.fixed_s == pytest.approx(0.02)
