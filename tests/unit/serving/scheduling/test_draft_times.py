"""Measured times decide how many guesses a step takes, and whether it takes any."""

import itertools

import pytest

from serving.scheduling.draft_times import DraftTimes

ONE_ROW = [(4, 3.0)]  # guesses and how many will be right


def plain(times, rows, seconds, count=3):
    for _ in range(count):
        times.add(drafts=False, rows=rows, num_tokens=rows, right=0, seconds=seconds)


def drafted(times, rows, num_drafts, right, seconds, count=3, expected=0.0):
    for _ in range(count):
        size = {"drafts": True, "rows": rows, "num_tokens": rows + num_drafts}
        times.add(**size, right=right, seconds=seconds, expected=expected)


def test_times_decide_whether_drafts_pay():
    times = DraftTimes()
    assert times.best(1, ONE_ROW) is None  # what a step costs without drafts is measured first
    for rows in (1, 20):
        plain(times, rows, 1.0)
    assert times.best(1, [(4, 0.5)]) == 0  # those with drafts are tried
    assert times.best(20, [(4, 0.5)]) is None  # however little they cost
    drafted(times, 1, 4, 2, 2.0)
    assert times.best(1, [(4, 1.5)]) == 0
    assert times.best(1, [(4, 1.0)]) is None
    plain(times, 1, 2.5, count=1)  # it began 1.5 s late
    drafted(times, 1, 4, 2, 3.5, count=4)
    assert times.best(1, [(4, 2.0)]) is None
    tries = [times.best(1, [(4, 2.0)]) for _ in range(600)]
    assert 0 in tries  # in the end they are measured anew
    tries = [times.best(1, [(4, 4.0)]) for _ in range(300)]
    assert None in tries  # and so are those without


def test_a_step_takes_as_many_guesses_as_give_the_most_tokens_a_second():
    """Steps of 4 rows and a CPU, where a token costs 2.2 ms beside 14."""
    choices = [(28, 21.0), (16, 15.0), (8, 7.6), (2, 1.9)]
    rates = [(4 + right) / (14 + 2.2 * (4 + count)) for count, right in choices]
    times = DraftTimes()
    plain(times, 4, 14 + 2.2 * 4)
    assert times.best(4, choices) == 0  # nothing is known of other sizes
    drafted(times, 4, 28, 20, 14 + 2.2 * 32)
    assert times.best(4, choices) == rates.index(max(rates)) == 1  # between the two on a line
    drafted(times, 4, 8, 7, 70.0)  # such steps are slow here
    assert times.best(4, choices) == 0
    assert times.best(4, [(8, 7.6)]) is None


def test_larger_steps_than_were_measured_are_expected_to_take_longer_still():
    times = DraftTimes()
    plain(times, 4, 10.0)
    drafted(times, 4, 4, 4, 20.0)
    assert times.best(4, [(28, 20.0)]) is None  # 80 s on the line
    assert times.best(4, [(28, 31.5)]) == 0
    cheap = DraftTimes()
    plain(cheap, 4, 10.0)
    drafted(cheap, 4, 4, 4, 9.0)  # no step is taken to be faster than a plain one
    assert cheap.best(4, [(28, 0.3)]) is None
    assert cheap.best(4, [(28, 0.5)]) == 0


def test_drafts_that_lose_at_many_rows_go_on_at_one():
    times = DraftTimes()
    for rows in (1, 8):
        plain(times, rows, 1.0)
    drafted(times, 8, 8, 1, 3.0, count=6)
    assert times.rest(8)
    assert not times.rest(1)
    drafted(times, 1, 4, 3, 1.5)
    assert times.best(1, ONE_ROW) == 0


def test_guesses_that_come_true_less_often_than_expected_are_worth_less():
    times = DraftTimes()
    plain(times, 1, 1.0)
    drafted(times, 1, 4, 1, 2.0, expected=3.0)
    assert times.best(1, [(4, 2.5)]) is None
    drafted(times, 1, 4, 3, 2.0, count=5, expected=3.0)
    assert times.best(1, [(4, 2.5)]) == 0


def test_a_step_after_others_charges_no_draft_with_their_time():
    """Steps that read a prompt, or an idle engine, lie between."""
    times = DraftTimes()
    plain(times, 1, 1.0)
    drafted(times, 1, 4, 3, 1.5, count=6)
    times.interrupt()
    plain(times, 1, 60.0, count=1)
    assert not times.rest(1)
    assert times.best(1, ONE_ROW) == 0
    drafted(times, 1, 4, 3, 1.5, count=1)
    plain(times, 1, 60.0, count=1)  # this one waited for the draft's results
    assert times.rest(1)


class Play:
    """Decides step after step; a step with drafts takes what `seconds` says."""

    def __init__(self):
        self.times, self.chosen = DraftTimes(), []

    def run(self, steps, right, seconds, expected=2.0):
        """`right` and `seconds` of a step with drafts, of a plain one 0 and 1."""
        for step in range(steps):
            pays = self.times.best(1, [(4, expected)]) is not None
            self.chosen.append(pays)
            size = {"drafts": pays, "rows": 1, "num_tokens": 5 if pays else 1}
            took = seconds(step) if pays else 1.0
            got = {"right": right(step) if pays else 0, "expected": expected if pays else 0.0}
            self.times.add(**size, **got, seconds=took)


def test_drafts_that_are_seldom_right_stop_to_pay_and_are_tried_ever_later():
    """However sure the guesses look: what came of them counts."""
    play = Play()
    play.run(20_000, lambda _: 0, lambda _: 1.3)
    tried = [step for step, pays in enumerate(play.chosen) if pays]
    assert len(tried) < 0.005 * 20_000
    gaps = [after - before for before, after in itertools.pairwise(tried)]
    long = [gap for gap in gaps if gap > 100]
    assert long == sorted(long)
    assert long[-1] > 4 * long[0]


def test_drafts_pay_again_when_a_text_begins_to_repeat_itself():
    play = Play()
    play.run(3000, lambda step: 3 if step > 500 else 0, lambda _: 1.3, expected=3.0)
    assert sum(play.chosen[:500]) < 30
    assert sum(play.chosen[-1000:]) > 950


def test_steps_with_drafts_that_cost_more_than_they_win_stop_although_most_of_them_pay():
    """Times of eight steps have a usual one; the sum counts what others cost."""
    play = Play()
    play.run(1000, lambda _: 1, lambda step: 1.3 if step % 4 else 5.0, expected=1.0)
    assert sum(play.chosen) < 50


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_nothing_is_lost_where_guesses_are_right_as_often_as_they_cost(rows):
    """One right guess of two pays for no step that takes twice as long for two."""
    times, seconds, plain_seconds = DraftTimes(), 0.0, 0.0
    for step in range(4000):
        chosen = times.best(rows, [(2 * rows, 1.0 * rows), (rows, 0.7 * rows)])
        num = 0 if chosen is None else (2 * rows, rows)[chosen]
        right = 0 if chosen is None else (rows // 2, rows // 3)[chosen]
        took = 1.0 + 0.5 * num / rows + 0.1 * (step % 5 == 0)
        size = {"drafts": bool(num), "rows": rows, "num_tokens": rows + num}
        times.add(**size, right=right, seconds=took, expected=0.8 * num)
        seconds, plain_seconds = seconds + took, plain_seconds + 1.02 * (1 + right / rows)
    assert plain_seconds > 0.99 * seconds
