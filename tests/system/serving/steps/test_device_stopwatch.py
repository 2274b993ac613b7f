"""Seconds of a device's programs are counted beside those who use the results."""

import threading
from types import SimpleNamespace

import pytest

from serving.steps import device_stopwatch
from serving.steps.device_stopwatch import DeviceStopwatch


@pytest.fixture
def clock(monkeypatch):
    """Return the clock of the stopwatch, which stands unless a result advances it."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(device_stopwatch, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


class Late:
    """A result that is there after some seconds of the clock, once it is let go."""

    def __init__(self, clock, seconds: float, may_come: threading.Event | None = None):
        self._clock, self._seconds, self._may_come = clock, seconds, may_come

    def block_until_ready(self) -> None:
        if self._may_come is not None:
            assert self._may_come.wait(30)
        self._clock.now += self._seconds


class Failed:
    """A result that never comes."""

    def block_until_ready(self) -> None:
        raise RuntimeError("the device failed")


def test_the_time_between_results_is_counted_and_nobody_waits(clock):
    watch, may_come = DeviceStopwatch(), threading.Event()
    watch.add(Late(clock, 0.25, may_come), Late(clock, 0.5))  # would wait for the event
    assert watch.count == 0
    may_come.set()
    watch.settle()
    assert (watch.count, watch.seconds) == (1, 0.5)


def test_what_fails_on_the_device_is_not_counted(clock):
    watch = DeviceStopwatch()
    watch.add(Late(clock, 0), Failed())
    watch.add(Late(clock, 0), Late(clock, 0))
    watch.settle()
    assert watch.count == 1
