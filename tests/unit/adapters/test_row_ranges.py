"""First-fit allocation of rows against a plain list of taken rows."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_jax.adapters.row_ranges import RowRanges, fits, runs_of, take_all


def test_what_fits_is_known_without_taking_it():
    pools = {4: RowRanges(10), 8: RowRanges(4)}
    assert fits(pools, [(4, 6), (8, 4), (4, 4)])
    assert not fits(pools, [(4, 6), (4, 5)])
    pools[4].take(3), pools[4].take(3), pools[4].give(0, 3)
    assert fits(pools, [(4, 3), (4, 4)]), "in two runs"
    assert not fits(pools, [(4, 5)])
    assert pools[4].ranges == ((0, 3), (6, 4))


@settings(max_examples=150, deadline=None)
@given(
    total=st.integers(0, 40),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=40),
)
def test_takes_the_first_gap_that_fits_and_loses_nothing(total, steps):
    ranges, free, held = RowRanges(total), [True] * total, []
    for take, number in steps:
        if take:
            fits = (s for s in range(total - number + 1) if all(free[s : s + number]))
            want = next(fits, None)
            assert ranges.copy().take(number) == want  # a copy is independent
            assert ranges.take(number) == want
            if want is not None:
                held.append((want, number))
                free[want : want + number] = [False] * number
        elif held:
            start, length = held.pop(number % len(held))
            ranges.give(start, length)
            free[start : start + length] = [True] * length
        assert ranges.num_free == sum(free)
        listed = [row for start, length in ranges.ranges for row in range(start, start + length)]
        assert listed == [row for row in range(total) if free[row]]
        ends = [start + length for start, length in ranges.ranges]
        starts = [start for start, _ in ranges.ranges]
        assert all(end < start for end, start in zip(ends, starts[1:], strict=False))


def test_bad_calls_are_refused():
    ranges = RowRanges(10)
    assert ranges.take(4) == 0
    for start, length in ((3, 2), (4, 1), (9, 2), (-1, 1), (0, 0)):
        with pytest.raises(ValueError, match="Rows"):
            ranges.give(start, length)
    with pytest.raises(ValueError, match="Cannot take 0"):
        ranges.take(0)
    with pytest.raises(ValueError, match="-1 rows"):
        RowRanges(-1)
    assert ranges.ranges == ((4, 6),)


def test_matrices_of_a_width_follow_each_other_where_there_is_room():
    pools = {8: RowRanges(20), 4: RowRanges(6)}
    demand = ((8, 3), (4, 2), (8, 5), (4, 1))
    assert take_all(pools, demand) == [0, 0, 3, 2]
    assert runs_of(demand, [0, 0, 3, 2]) == ((8, 0, 8), (4, 0, 3))
    assert take_all(pools, ((8, 9), (4, 4))) is None
    assert (pools[8].num_free, pools[4].num_free) == (12, 3), "nothing was taken"


def test_matrices_in_gaps_are_runs_of_their_own():
    demand = ((8, 3), (4, 2), (8, 5), (8, 1), (4, 1))
    assert runs_of(demand, [9, 0, 2, 7, 5]) == ((8, 9, 3), (4, 0, 2), (8, 2, 6), (4, 5, 1))
    assert runs_of((), ()) == ()


def test_matrices_go_into_gaps_where_no_run_holds_all():
    pools = {8: RowRanges(12)}
    starts = take_all(pools, ((8, 4), (8, 4), (8, 4)))
    assert starts == [0, 4, 8]
    pools[8].give(0, 4)
    pools[8].give(8, 4)
    assert take_all(pools, ((8, 3), (8, 4))) == [0, 8]
    assert pools[8].ranges == ((3, 1),)
