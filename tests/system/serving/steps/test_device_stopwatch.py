"""Seconds of a device's programs are counted beside those who use the results."""

import time

from serving.steps.device_stopwatch import DeviceStopwatch


class Late:
    """A result that is there at a time."""

    def __init__(self, seconds: float):
        self._at = time.monotonic() + seconds

    def block_until_ready(self) -> None:
        time.sleep(max(0.0, self._at - time.monotonic()))


class Failed:
    """A result that never comes."""

    def block_until_ready(self) -> None:
        raise RuntimeError("the device failed")


def test_the_time_between_results_is_counted_and_nobody_waits():
    watch, start = DeviceStopwatch(), time.monotonic()
    watch.add(Late(0.2), Late(0.3))
    assert time.monotonic() - start < 0.15
    watch.settle()
    assert watch.count == 1
    assert 0.05 < watch.seconds < 0.2


def test_what_fails_on_the_device_is_not_counted():
    watch = DeviceStopwatch()
    watch.add(Late(0), Failed())
    watch.add(Late(0), Late(0))
    watch.settle()
    assert watch.count == 1
