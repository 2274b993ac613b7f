"""Running sequences in order of their deadlines; each has a row, and no two have the same."""

import random

import pytest

from serving.api.request import Request, Sequence
from serving.api.sampling import Sampling
from serving.scheduling.running_line import RunningLine


def sequence(number: int, deadline_s: float = 0.0) -> Sequence:
    request = Request("r", (1,), Sampling(), None, "", lambda delta: None, 0.0, deadline_s)
    return Sequence(request, 0, 0, [1], number=number)


def test_rows_are_given_lowest_first_and_taken_back():
    rng, line, held = random.Random(2), RunningLine(5), []
    for number in range(60):
        if line.num_free_rows:
            free = set(range(5)) - {one.row for one in held}
            held.append(sequence(number, rng.random()))
            line.add(held[-1])
            assert held[-1].row == min(free)
        if rng.random() < 0.6:
            gone = held.pop(rng.randrange(len(held)))
            line.remove(gone)
            assert gone.row < 0
        line.check_integrity()
        assert len(line) == len(held) == 5 - line.num_free_rows
    assert list(line) == sorted(held, key=lambda one: one.order)


def test_a_sequence_that_does_not_run_cannot_be_taken_out():
    line = RunningLine(2)
    line.add(sequence(1))
    with pytest.raises((AssertionError, IndexError)):
        line.remove(sequence(2))


@pytest.mark.parametrize("row", [-1, 1, 4])
def test_rows_lost_or_twice_are_found(row):
    line = RunningLine(4)
    for number in (0, 1):
        line.add(sequence(number))
    line.check_integrity()
    next(iter(line)).row = row
    with pytest.raises(AssertionError, match="rows"):
        line.check_integrity()


def test_a_line_out_of_order_is_found():
    line = RunningLine(2)
    for number in (0, 1):
        line.add(sequence(number))
    next(iter(line)).number = 7
    with pytest.raises(AssertionError, match="order"):
        line.check_integrity()
