"""The next plan waits where several tenants ask, as long as the device is not kept waiting."""

import pytest

from serving.engine.loop.pacing import Pacer

STEP_S, HOST_S = 0.010, 0.001
ROWS = 32


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def paced(*tenants: str, steps: int = 20) -> tuple[Clock, Pacer]:
    """A pacer after some steps that followed each other at once."""
    clock = Clock()
    pacer = Pacer(clock)
    for tenant in tenants:
        pacer.asked(tenant)
    began, clock.now = clock.now, clock.now + HOST_S
    pacer.dispatched(began, follows=False)
    for _ in range(steps):
        began, clock.now = clock.now, clock.now + HOST_S
        pacer.dispatched(began, follows=True)
        reading, clock.now = clock.now, clock.now + STEP_S - HOST_S
        pacer.ended(ROWS, reading)
    return clock, pacer


def test_a_plan_waits_until_the_host_has_just_time_for_it():
    clock, pacer = paced("a", "b")
    assert pacer.wait_s(ROWS) == pytest.approx(STEP_S - HOST_S - 0.1 * STEP_S)
    clock.now += 0.004
    assert pacer.wait_s(ROWS) == pytest.approx(STEP_S - HOST_S - 0.1 * STEP_S - 0.004)
    clock.now += 0.006
    assert pacer.wait_s(ROWS) == 0.0


def test_one_tenant_waits_on_demand_alone_and_never_beside_a_step_of_unknown_size():
    assert paced("a")[1].wait_s(ROWS) == 0.0
    assert paced("a")[1].wait_s(ROWS, late=True) == pytest.approx(0.9 * STEP_S - HOST_S)
    assert paced("a", "b")[1].wait_s(4 * ROWS) == 0.0
    assert paced("a", "b", steps=0)[1].wait_s(ROWS) == 0.0


def test_a_tenant_that_is_long_gone_does_not_count():
    clock, pacer = paced("a", "b")
    clock.now += 50
    pacer.asked("a")
    pacer.ended(ROWS, clock.now)
    assert pacer.wait_s(ROWS) > 0
    clock.now += 20
    pacer.ended(ROWS, clock.now)
    assert pacer.wait_s(ROWS) == 0.0


def test_a_guess_that_was_too_long_is_shortened_at_once():
    clock, pacer = paced("a", "b")
    waits = [pacer.wait_s(ROWS)]
    for _ in range(5):  # each had ended before it was read
        pacer.ended(ROWS, clock.now)
        waits.append(pacer.wait_s(ROWS))
    assert waits == sorted(waits, reverse=True)
    assert waits[-1] < 0.3 * waits[0]


def test_one_slow_step_does_not_lengthen_the_wait():
    clock, pacer = paced("a", "b")
    before = pacer.wait_s(ROWS)
    reading, clock.now = clock.now, clock.now + 1.0
    pacer.ended(ROWS, reading)
    assert pacer.wait_s(ROWS) == pytest.approx(before)
