"""Turns as the keeper saw them: in order, each told once, none of a turn that nobody has."""

import pytest

from serving.functions.turns import log as turn_log
from serving.functions.turns.log import Stamps, TurnLog


def test_a_turn_has_the_times_of_its_hand_over():
    log, stamps = TurnLog(), Stamps(heard=1.1, began=1.2, noticed=2.1, passed=2.2)
    log.granted("a", 1.0)
    log.recalled("a", 2.0)
    log.back("a", stamps, 2.3)
    log.granted("b", 2.4)  # behind the last step of a
    assert log.ended("a", 2.5) == pytest.approx((0.3, 0.2))
    assert log.ended("b", 2.5) is None  # it was not asked back
    first, second = log.turns
    assert (first.name, first.granted, first.recalled, first.back, first.ended) == (
        "a",
        1.0,
        2.0,
        2.3,
        2.5,
    )
    assert first.stamps == stamps
    assert (second.name, second.granted, second.ended) == ("b", 2.4, 2.5)


def test_a_turn_comes_back_once():
    log = TurnLog()
    log.granted("a", 1.0)
    log.back("a", Stamps(heard=1.1), 2.0)
    log.back("a", Stamps(heard=9.0), 3.0)
    assert (log.turns[0].back, log.turns[0].stamps.heard) == (2.0, 1.1)


def test_what_is_said_of_no_open_turn_changes_nothing():
    log = TurnLog()
    log.granted("a", 1.0)
    log.ended("a", 2.0)
    for tell in (log.recalled, log.ended):
        tell("a", 3.0)
        tell("nobody", 3.0)
    log.back("a", Stamps(), 3.0)
    (turn,) = log.turns
    assert (turn.recalled, turn.back, turn.ended) == (0.0, 0.0, 2.0)


def test_a_turn_that_ends_with_its_function_has_no_last_step():
    log = TurnLog()
    log.granted("a", 1.0)
    log.recalled("a", 2.0)
    assert log.ended("a", 2.5) == (0.5, 0.0)


def test_old_turns_are_forgotten(monkeypatch):
    monkeypatch.setattr(turn_log, "_KEPT", 2)
    log = TurnLog()
    for number in range(5):
        log.granted(f"f{number}", float(number))
    assert [turn.name for turn in log.turns] == ["f3", "f4"]
