"""Memory of functions as an agent sees it; bounds are those of `process_memory`."""

import os
from types import SimpleNamespace

import pytest

from serving.functions.seen_memory import SeenMemory


def test_a_process_cannot_say_less_or_more_than_what_it_has():
    seen = SeenMemory(SimpleNamespace(pid=-1))  # nothing is inherited
    least, most = seen.bytes_of(os.getpid(), 0), seen.bytes_of(os.getpid(), 1e18)
    assert 1 << 20 < least <= most < 1 << 40
    function = SimpleNamespace(running=SimpleNamespace(own_pid=os.getpid()))
    assert 1 << 20 < seen.least_of(function) < 1 << 40


@pytest.mark.parametrize("running", [None, SimpleNamespace(own_pid=None)])
def test_of_a_process_of_several_functions_the_share_is_what_is_said(running):
    seen = SeenMemory(SimpleNamespace(pid=-1))
    assert seen.bytes_of(None, 7) == 7
    assert seen.least_of(SimpleNamespace(running=running)) == 0


@pytest.mark.parametrize(("said", "error"), [("much", ValueError), ([], TypeError)])
def test_what_is_no_number_is_an_error(said, error):
    with pytest.raises(error):
        SeenMemory(SimpleNamespace(pid=-1)).bytes_of(os.getpid(), said)
