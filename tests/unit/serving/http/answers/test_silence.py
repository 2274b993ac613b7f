"""One timer for all waits of a stream: long ones are told, short ones and pauses are not."""

import asyncio

from serving.http.answers.silence import Silence


class Clock:
    """An event loop's timers, whose time goes on by hand."""

    def __init__(self):
        self.now, self.timers = 100.0, []

    def time(self):
        return self.now

    def call_later(self, seconds, call):
        timer = asyncio.TimerHandle(self.now + seconds, call, (), self)
        self.timers.append(timer)
        return timer

    def _timer_handle_cancelled(self, timer):
        """asyncio's loops count these."""

    def get_debug(self):
        return False

    def run_until(self, end):
        while due := [t for t in self.timers if not t.cancelled() and t.when() <= end]:
            first = min(due, key=lambda timer: timer.when())
            self.timers.remove(first)
            self.now = first.when()
            first._callback()
        self.now = end


def made():
    clock, told = Clock(), []
    return clock, told, Silence(clock, 10.0, lambda: told.append(clock.now))


def test_a_long_wait_is_told_when_it_is_long():
    clock, told, silence = made()
    clock.run_until(103.0)
    silence.begin()
    clock.run_until(112.9)
    assert not told
    clock.run_until(114.0)
    assert told == [113.0]


def test_waits_that_end_in_time_are_not_told():
    clock, told, silence = made()
    for place in range(50):
        silence.begin()
        clock.run_until(100.0 + 9.0 * (place + 1))
        silence.end()
    assert not told


def test_who_does_not_wait_is_told_nothing():
    clock, told, _ = made()
    clock.run_until(200.0)
    assert not told


def test_a_wait_is_told_once_until_the_next_begins():
    clock, told, silence = made()
    silence.begin()
    clock.run_until(150.0)
    assert told == [110.0]
    silence.begin()
    clock.run_until(161.0)
    assert told == [110.0, 160.0]


def test_nothing_is_told_after_the_end():
    clock, told, silence = made()
    silence.begin()
    silence.close()
    clock.run_until(200.0)
    assert not told
