"""Turns on one device: nobody else asks, margins, expired batches, and turns not given back."""

import math
import random

import pytest

from serving.functions.turns.table import (
    EARLY_S,
    EARLY_SAVED_S,
    EARLY_SHARE,
    NEVER_S,
    Ask,
    TurnTable,
)


def ask(slo_s=1.0, waited_s=0.0, run_s=0.01, leaves_s=0.9) -> Ask:
    return Ask(slo_s, waited_s, run_s, leaves_s)


def test_a_lone_function_keeps_its_turn():
    table = TurnTable(turn_s=0.1)
    table.asks("a", ask(), 0.0)
    assert (table.grant(0.0), table.holder) == ("a", "a")
    assert table.next_look() == math.inf
    assert table.recall(1e6) is None
    assert table.grant(1e6) is None


def test_whatever_others_claim_work_that_waits_long_has_the_next_turn():
    table, granted = TurnTable(turn_s=0.1), []
    table.asks("honest", ask(slo_s=1.0), 0.0)
    for now in range(12):
        for name in ("a", "b"):  # they help one another
            table.asks(name, ask(slo_s=0.0, waited_s=1e6), now)
        granted.append(table.grant(now))
        table.gives_back(granted[-1])
    assert "honest" not in granted[:10]
    assert granted[10] == "honest"
    table.asks("idle", ask(leaves_s=NEVER_S), 0.0)  # waits for a device that nobody wants
    assert table.grant(100.0) in ("a", "b")


def test_the_least_margin_is_next_and_a_full_turn_is_asked_back_once():
    table = TurnTable(turn_s=0.1, early_share=0)
    table.asks("a", ask(), 0.0)
    table.grant(0.0)
    table.asks("patient", ask(slo_s=2.0), 0.0)
    table.asks("urgent", ask(slo_s=1.0), 0.01)
    assert table.next_look() == 0.1
    assert table.recall(0.09) is None
    assert table.recall(0.1) == "a"
    assert table.recall(0.2) is None
    assert table.grant(0.2) is None
    table.gives_back("a")
    assert table.grant(0.2) == "urgent"
    table.gives_back("urgent")
    assert table.grant(0.2) == "patient"


def test_an_expired_batch_interrupts_a_turn_but_not_at_once():
    table = TurnTable(turn_s=0.1, early_share=0)
    table.asks("a", ask(), 0.0)
    table.grant(0.0)
    table.asks("b", ask(leaves_s=-5.0), 0.001)
    assert table.recall(0.001) is None
    assert table.next_look() == pytest.approx(0.02)
    assert table.recall(0.02) == "a"


def test_a_turn_is_asked_back_a_hand_over_before_a_batch_expires():
    table = TurnTable(turn_s=1.0, early_share=0)
    table.asks("a", ask(), 0.0)
    table.grant(0.0)
    table.asks("b", ask(leaves_s=0.5), 0.0)
    assert table.next_look() == 0.5
    for seconds in (0.0625, 0.125, 0.25, 9.0):  # one of many may be wild
        table.handed_over(seconds, 0.0)
    table.handed_over(0.125, 0.0)
    assert table.next_look() == 0.375
    assert table.recall(0.37) is None
    assert table.recall(0.375) == "a"


@pytest.mark.parametrize(("overlaps", "look"), [(True, 0.6875), (False, 0.375)])
def test_while_a_long_last_step_runs_the_next_turn_has_half_of_the_device(overlaps, look):
    table = TurnTable(turn_s=1.0, overlaps=overlaps)
    table.asks("a", ask(), 0.0)
    table.grant(0.0)
    table.handed_over(0.0, 0.625)
    table.asks("b", ask(slo_s=2.0, leaves_s=1.0), 0.0)
    assert table.next_look() == look


def test_a_batch_that_cannot_be_in_time_any_more_waits_for_the_turns_end():
    """Else all turns of a device with too much work are the shortest, and hand-overs take it."""
    table = TurnTable(turn_s=0.1, early_share=0)
    table.asks("a", ask(), 0.0)
    table.grant(0.0)
    table.asks("late", ask(slo_s=0.09, waited_s=0.5, leaves_s=-0.4), 0.0)
    table.asks("goes on", ask(slo_s=0.09, leaves_s=0.09), 0.0)
    assert table.next_look() == pytest.approx(0.1)
    table.asks("soon late", ask(slo_s=0.09, waited_s=0.05, leaves_s=0.01), 0.0)
    assert table.next_look() == pytest.approx(0.02)  # it can be in time


def goes_on(slo_s=1.0) -> Ask:
    """Return the ask of answers that go on."""
    return Ask(slo_s, 0.0, 0.1, slo_s)


def test_first_tokens_interrupt_answers_that_go_on_and_are_next():
    table = TurnTable(turn_s=0.1)
    table.asks("a", goes_on(), 0.0)
    table.grant(0.0)
    table.asks("b", goes_on(), 0.01)
    assert table.next_look() == 0.1
    table.asks("new", ask(), 0.05)
    assert table.next_look() == 0.05
    assert table.recall(0.05) == "a"
    table.gives_back("a")
    table.asks("a", goes_on(), 0.051)
    assert table.grant(0.051) == "new"
    assert table.next_look() == pytest.approx(0.151)  # answers interrupt nobody


def test_first_tokens_leave_those_of_others_their_time():
    table = TurnTable(turn_s=0.1)
    table.asks("a", ask(run_s=0.03), 0.0)
    table.grant(0.0)
    table.asks("b", ask(), 0.001)
    assert table.next_look() == 0.03
    table.gives_back("a")
    table.asks("a", goes_on(), 0.03)
    table.grant(0.03)
    table.gives_back("b")
    assert table.grant(0.04) == "a"
    table.asks("b", ask(), 0.0405)
    assert table.next_look() == pytest.approx(0.04 + EARLY_S)


@pytest.mark.parametrize(
    "new", [ask(waited_s=1.5, leaves_s=-0.5), ask(slo_s=0.05, leaves_s=0.04)], ids=["late", "later"]
)
def test_first_tokens_that_would_not_be_next_interrupt_nobody(new):
    """One is late; with the other its turn would go to an answer that is about to be late."""
    table = TurnTable(turn_s=0.1)
    table.asks("a", goes_on(), 0.0)
    table.grant(0.0)
    table.asks("due", goes_on(slo_s=0.15), 0.0)
    table.asks("new", new, 0.01)
    assert table.next_look() >= 0.02  # as an expired batch may
    assert table.recall(0.019) is None


def test_early_hand_overs_take_their_share_of_the_time_at_most():
    table, now, num_early = TurnTable(turn_s=0.1), 0.0, 0
    table.asks("a", goes_on(), 0.0)
    while now < 10.0:
        name = table.grant(now)
        assert name
        since = now
        table.asks("ab"[name == "a"], ask(run_s=0.0), now)
        now = table.next_look()
        num_early += now < since + 0.1
        assert table.recall(now) == name
        table.handed_over(0.002, 0.002)
        table.gives_back(name)
        table.asks(name, goes_on(), now)
    cost_s = 0.003 * num_early
    assert 0.9 * (10 * EARLY_SHARE) < cost_s < 10 * EARLY_SHARE + EARLY_SAVED_S + 2 * 0.003


def test_eight_functions_with_more_work_than_the_device_have_whole_turns():
    table, turns, now = TurnTable(turn_s=0.1), 0, 0.0
    for name in "abcdefgh":
        table.asks(name, ask(0.09, leaves_s=0.05), 0.0)
    while now < 20:
        assert table.grant(now)
        turns, now = turns + 1, table.next_look()
        name = table.recall(now)
        table.gives_back(name)
        table.asks(name, ask(0.09, 0.1, leaves_s=-0.05), now)  # late already
    assert turns == pytest.approx(200, abs=10)


def test_work_that_nobody_waits_for_takes_no_turn_from_others():
    table = TurnTable(turn_s=0.1)
    table.asks("a", ask(), 0.0)
    table.grant(0.0)
    table.asks("idle", ask(NEVER_S, 0.0, 0.0, NEVER_S), 0.0)
    assert table.next_look() == math.inf
    assert table.recall(50.0) is None
    table.asks("b", ask(), 50.0)
    table.gives_back("a")
    assert table.grant(50.0) == "b"
    table.gives_back("b")
    assert table.grant(50.0) == "idle"


def test_what_crosses_a_grant_is_no_second_turn():
    """A function whose work is done does not listen, and would keep that turn from others."""
    table = TurnTable(turn_s=0.1)
    table.asks("a", ask(NEVER_S, 0.0, 0.0, NEVER_S), 0.0)
    assert table.grant(0.0) == "a"
    table.asks("a", ask(), 0.0)  # a request came before it heard of its turn
    assert table.next_look() == math.inf
    table.gives_back("a")
    assert table.grant(1.0) is None
    table.asks("a", ask(), 1.0)
    assert table.grant(1.0) == "a"


def test_a_turn_that_is_not_given_back_is_taken_away():
    table = TurnTable(turn_s=0.1, overdue_s=1.0)
    table.asks("stuck", ask(), 0.0)
    table.grant(0.0)
    table.asks("b", ask(), 0.0)
    assert table.recall(0.1) == "stuck"
    assert table.take_late(1.0) == []
    assert table.grant(1.0) is None
    assert table.take_late(1.1) == ["stuck"]
    assert (table.grant(1.1), table.num_taken) == ("b", 1)
    table.gives_back("stuck")  # late: it is another's turn
    assert table.holder == "b"


def asking(names: str, **given) -> TurnTable:
    table = TurnTable(turn_s=0.1, overdue_s=1.0, **given)
    for name in names:
        table.asks(name, ask(), 0.0)
    return table


def test_a_turn_may_begin_while_the_last_step_of_the_one_before_runs():
    table = asking("abc")
    assert (table.grant(0.0), table.is_shared) == ("a", False)
    table.passes_on("a", 0.1)
    assert (table.grant(0.1), table.is_shared, table.alone()) == ("b", True, None)
    table.passes_on("b", 0.2)
    assert table.grant(0.2) is None  # a's step and b's run
    table.gives_back("a")
    assert (table.grant(0.2), table.alone()) == ("c", None)
    table.gives_back("b")
    assert (table.alone(), table.is_shared, table.alone()) == ("c", False, None)


def test_without_overlap_a_turn_begins_when_the_last_step_was_read():
    table = asking("ab", overlaps=False)
    assert table.grant(0.0) == "a"
    table.passes_on("a", 0.1)
    assert table.grant(0.1) is None
    table.gives_back("a")
    assert (table.grant(0.1), table.is_shared) == ("b", False)


def test_a_last_step_that_never_ends_holds_others_up_for_its_limit():
    table = asking("abc")
    table.grant(0.0)
    table.passes_on("a", 0.1)
    table.grant(0.1)
    table.passes_on("b", 0.2)
    assert table.next_look() == pytest.approx(1.1)
    assert table.take_late(1.09) == []
    assert table.take_late(1.11) == ["a"]
    assert (table.grant(1.11), table.num_taken) == ("c", 1)
    table.passes_on("a", 1.2)  # late words change nothing
    table.gives_back("a")
    assert table.holder == "c"


def test_one_that_asks_again_has_read_its_last_step_and_one_that_is_gone_runs_none():
    table = asking("abc")
    table.grant(0.0)
    table.passes_on("a", 0.1)
    table.grant(0.1)
    table.asks("a", ask(), 0.1)
    assert table.alone() == "b"
    table.passes_on("b", 0.2)
    table.gone("b")
    assert (table.grant(0.2), table.is_shared) == ("c", False)


def test_a_dead_function_has_no_turn_and_asks_for_none():
    table = TurnTable()
    table.asks("a", ask(), 0.0)
    table.grant(0.0)
    table.asks("b", ask(), 0.0)
    table.asks("c", ask(), 0.0)
    table.gone("a")
    table.gone("b")
    assert table.grant(0.0) == "c"


@pytest.mark.parametrize("seed", range(3))
def test_whatever_functions_say_two_at_most_have_steps_on_the_device(seed):
    """A random order of words, lies and deaths among them, against what the words mean."""
    chance, table, now, running = random.Random(seed), TurnTable(0.1, 1.0), 0.0, {}
    for _ in range(3000):
        name, now = chance.choice("abcde"), now + chance.choice((0.0, 0.01, 0.3))
        word = chance.choice(("asks", "asks", "passes_on", "gives_back", "gone"))
        if word == "asks":
            table.asks(name, ask(chance.uniform(0.1, 2.0)), now)
        elif word == "passes_on":
            table.passes_on(name, now)
        else:
            getattr(table, word)(name)
        if word != "passes_on" and (word != "asks" or table.holder != name):
            running.pop(name, None)
        for late in table.take_late(now):
            del running[late]
        holder = table.holder
        granted = table.grant(now)
        if granted is not None:
            assert holder is None
            assert granted not in running
            running[granted] = now
        assert (table.holder is None) or table.holder in running
        assert len(running) <= 2
        assert table.is_shared <= (table.holder is not None)
        assert (table.alone() is None) or len(running) == 1
        table.recall(now)
    for _ in "abcde-":  # nobody is kept from a turn, if no function says anything any more
        table.recall(now)
        now += 1.1
        table.take_late(now)
        table.grant(now)
    assert not table._asking


@pytest.mark.parametrize("seed", range(3))
def test_nobody_waits_much_longer_than_its_deadline(seed):
    """4 functions work for ever, and some have much less time than others."""
    chance, table = random.Random(seed), TurnTable(turn_s=0.1)
    slo = {name: chance.uniform(0.1, 3.0) for name in "abcd"}
    asked, now = dict.fromkeys(slo, 0.0), 0.0
    for name, seconds in slo.items():
        table.asks(name, ask(seconds), now)
    for _ in range(400):
        granted = table.grant(now)
        if granted is not None:
            assert now - asked[granted] <= slo[granted] + len(slo) * 0.1
        now = max(now, table.next_look())
        recalled = table.recall(now)
        assert recalled == table.holder
        table.gives_back(recalled)
        table.asks(recalled, ask(slo[recalled]), now)
        asked[recalled] = now


def test_functions_of_one_deadline_have_equal_shares():
    table, turns, now = TurnTable(turn_s=0.1), dict.fromkeys("abcd", 0), 0.0
    for name in turns:
        table.asks(name, ask(), now)
    for _ in range(400):
        turns[table.grant(now)] += 1
        now = table.next_look()
        name = table.recall(now)
        table.gives_back(name)
        table.asks(name, ask(), now)
    assert set(turns.values()) == {100}
