"""A child leaves when its parent hangs up, or is made to; both only once."""

import multiprocessing
import multiprocessing.connection
import signal
import time
from types import SimpleNamespace

import pytest

from serving.runtime.child_process import AbstractChild, Pulse


def leave_on_end_of(connection):
    """Be a child that keeps the rule."""
    connection.send_bytes(b"here")
    try:
        connection.recv_bytes()
    except EOFError:
        return


def stay(connection):
    """Be a child that does not."""
    connection.send_bytes(b"here")
    signal.pause()


class Child(AbstractChild):
    def __init__(self, main, end_s):
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        process = context.Process(target=main, args=(theirs,), daemon=True)
        super().__init__(process, end_s)
        theirs.close()
        assert self.connection.recv_bytes() == b"here"
        self.status = process

    def hang_up(self):
        self.connection.close()

    def pulse(self, limit_s):
        return Pulse.UP


@pytest.mark.parametrize(("main", "end_s"), [(leave_on_end_of, 60.0), (stay, 0.1)])
def test_stop_ends_it_one_way_or_the_other(main, end_s):
    child = Child(main, end_s)
    assert child.pid
    assert not child.is_ready
    assert not multiprocessing.connection.wait([child.sentinel], 0)
    child.stop()
    with pytest.raises(ValueError, match="closed"):
        child.status.is_alive()
    child.stop()


def test_the_time_to_leave_may_be_cut_short():
    child = Child(stay, 600.0)
    begun = time.monotonic()
    child.stop(0.1)
    assert time.monotonic() - begun < 60


def test_a_killed_child_is_seen_and_can_be_stopped():
    child = Child(leave_on_end_of, 60.0)
    child.kill()
    assert multiprocessing.connection.wait([child.sentinel], 60)
    assert child.end_by_signal() == " (SIGKILL)"
    child.stop()
    assert child.end_by_signal() == ""  # its handle is closed


@pytest.mark.parametrize(
    ("status", "how"), [(None, ""), (1, ""), (-15, " (SIGTERM)"), (-99, " (99)")]
)
def test_only_a_signal_that_has_ended_a_child_is_told(status, how):
    child = object.__new__(Child)
    child._process = SimpleNamespace(join=lambda wait_s: None, exitcode=status)
    assert child.end_by_signal() == how
