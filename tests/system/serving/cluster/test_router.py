"""Adapters stay where they are, base requests go where least is under way."""

import pytest

from serving.cluster import router
from serving.cluster.router import Router


def test_known_adapters_are_spread_evenly():
    made = Router(2, ["a", "b", "c", "d"])
    assert sorted(made.instance_of.values()) == [0, 0, 1, 1]
    for name, home in made.instance_of.items():
        assert {made.choose(name) for _ in range(5)} == {home}


def test_an_adapter_seen_for_the_first_time_goes_to_the_least_loaded():
    made = Router(2)
    heavy = made.choose("heavy", 100.0)
    made.answered("heavy", heavy, 100.0)
    light = made.choose("light", 1.0)
    made.answered("light", light, 1.0)
    assert light != heavy
    made.done(heavy)
    made.done(light)
    assert made.choose("third", 1.0) == light
    assert made.choose("heavy") == heavy


def test_no_name_is_kept_that_no_instance_has_answered_for(monkeypatch):
    monkeypatch.setattr(router, "_MOST_NAMES", 3)
    made = Router(2, ["a"])
    for number in range(1000):
        made.done(made.choose(f"unknown-{number}"))
    assert list(made.instance_of) == ["a"]
    for number in range(10):
        made.answered(f"known-{number}", 0, 2.0 + number)
        made.answered(f"known-{number}", 1)  # it has a home
    assert len(made.instance_of) == 3
    assert made.instance_of["known-9"] == 0
    made.forget("known-9")
    made.forget("known-9")
    assert "known-9" not in made.instance_of


def test_base_requests_go_where_least_is_under_way():
    made = Router(3)
    assert [made.choose(None) for _ in range(4)] == [0, 1, 2, 0]
    made.done(1)
    assert made.choose(None) == 1


def test_an_instance_that_is_down_is_passed_by_while_there_are_others():
    made = Router(2, ["a", "b"])
    home = made.instance_of["a"]
    made.set_up(home, False)
    assert made.up == (1 - home,)
    assert made.choose("a") == 1 - home
    assert made.choose("a", avoid=[1 - home]) == home  # nobody else is left
    made.set_up(home, True)
    assert made.choose("a") == home
    assert made.choose("a", avoid=[home]) == 1 - home


def test_loads_are_looked_at_again(monkeypatch):
    monkeypatch.setattr(router, "_REPLAN", 10)
    made = Router(2, ["a", "b", "c", "d"])
    homes = made.instance_of
    together = [name for name in homes if homes[name] == 0]
    for _ in range(5):  # both heavy ones are on one instance
        for name in together:
            made.choose(name, 100.0)
    now = made.instance_of
    assert now[together[0]] != now[together[1]]


def test_every_choice_is_ended_once():
    made = Router(2)
    for _ in range(10):
        made.done(made.choose("x"))
    assert made.choose(None) == 0


@pytest.mark.parametrize("instances", [1, 3])
def test_all_down_is_no_reason_to_choose_nobody(instances):
    made = Router(instances)
    for number in range(instances):
        made.set_up(number, False)
    assert made.choose("a") in range(instances)
    assert made.choose(None) in range(instances)


def test_a_merged_adapter_has_the_last_instance_and_nothing_else_goes_there():
    made = Router(3, ["a", "b", "hot"], merged="hot")
    assert {made.choose("hot") for _ in range(9)} == {2}
    others = [made.choose(name) for name in ("a", "b", "new", None) for _ in range(5)]
    assert set(others) == {0, 1}
    made.answered("hot", 2)
    assert "hot" not in made.instance_of
    made.set_up(2, False)
    assert made.choose("hot") in (0, 1)  # which have it too, unmerged
    made.set_up(2, True)
    for number in (0, 1):
        made.set_up(number, False)
    assert made.choose(None) in (0, 1)
    assert made.choose("hot") == 2


def test_a_process_that_comes_in_another_ones_place_has_a_life_of_its_own():
    made = Router(2)
    first = made.life(0)
    made.set_up(0, True)
    assert made.life(0) == first
    made.set_up(0, False)
    made.set_up(0, False)
    assert made.life(0) == first  # of which late news may come
    made.set_up(0, True)
    assert made.life(0) not in (first, made.life(1))
