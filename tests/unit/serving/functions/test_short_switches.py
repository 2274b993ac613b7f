"""The interpreter's switch interval while turns are kept, and afterwards."""

import sys

import pytest

from serving.engine.loop.pacing import SWITCH_S
from serving.functions.short_switches import ShortSwitches


@pytest.fixture(autouse=True)
def _restore():
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_the_last_caller_to_leave_restores_the_interval():
    sys.setswitchinterval(0.005)
    switches = ShortSwitches()
    one, other = switches.within(), switches.within()
    one.__enter__()
    other.__enter__()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S)
    other.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.005)


def test_a_shorter_interval_stays_and_an_error_restores_too():
    sys.setswitchinterval(SWITCH_S / 3)
    found = []

    def fail():
        with ShortSwitches().within():
            found.append(sys.getswitchinterval())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert found == pytest.approx([SWITCH_S / 3], rel=0.02)
    assert sys.getswitchinterval() == pytest.approx(SWITCH_S / 3, rel=0.02)
