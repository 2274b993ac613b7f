"""Seconds of a device's programs are counted beside those who use the results."""

import threading
from types import SimpleNamespace

import pytest

from serving.steps import device_stopwatch
from serving.steps.device_stopwatch import DeviceStopwatch


class Clock:
    """Time that passes as the device gives results."""

    def __init__(self):
        self.now, self.may_run = 0.0, threading.Event()

    def late(self, at):
        def block_until_ready():
            assert self.may_run.wait(60)
            self.now = at

        return SimpleNamespace(block_until_ready=block_until_ready)

    def failed(self):
        def block_until_ready():
            raise RuntimeError("the device failed")

        return SimpleNamespace(block_until_ready=block_until_ready)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(device_stopwatch, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_the_time_between_results_is_counted_and_nobody_waits(clock):
    watch = DeviceStopwatch()
    watch.add(clock.late(0.25), clock.late(0.375))
    assert (watch.count, watch.seconds) == (0, 0.0)  # the device has not run yet
    clock.may_run.set()
    watch.settle()
    assert (watch.count, watch.seconds) == (1, 0.125)
    watch.add(clock.late(1.0), clock.late(1.5))
    watch.settle()
    assert (watch.count, watch.seconds) == (2, 0.625)


def test_what_fails_on_the_device_is_not_counted(clock):
    watch = DeviceStopwatch()
    clock.may_run.set()
    watch.add(clock.late(1.0), clock.failed())
    watch.add(clock.late(2.0), clock.late(2.5))
    watch.settle()
    assert (watch.count, watch.seconds) == (1, 0.5)
