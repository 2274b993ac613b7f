"""Frees that wait for a step: never early, in order, once."""

import pytest

from lora_jax.memory.retirement import Retirement


def test_nothing_is_freed_before_its_step_has_completed():
    retirement, freed = Retirement(), []
    for step in (3, 1, 2, 3):
        retirement.defer(step, lambda step=step: freed.append(step))
    assert retirement.completed(0) == 0
    assert freed == []
    assert retirement.completed(2) == 2
    assert freed == [1, 2]
    assert retirement.num_waiting == 2
    assert retirement.completed(7) == 2
    assert freed == [1, 2, 3, 3]
    assert retirement.num_waiting == 0


def test_those_of_one_step_go_in_the_order_they_came():
    retirement, freed = Retirement(), []
    for name in "cab":
        retirement.defer(4, lambda name=name: freed.append(name))
    retirement.completed(4)
    assert freed == list("cab")


def test_a_step_that_is_over_frees_at_once():
    retirement, freed = Retirement(), []
    retirement.completed(5)
    retirement.defer(5, lambda: freed.append("now"))
    retirement.defer(6, lambda: freed.append("later"))
    assert freed == ["now"]
    retirement.completed(4)  # an older step again says nothing new
    assert freed == ["now"]


def test_a_free_that_fails_is_not_repeated_and_holds_nobody_for_long():
    retirement, freed = Retirement(), []

    def fail() -> None:
        raise RuntimeError("cannot")

    retirement.defer(1, fail)
    retirement.defer(1, lambda: freed.append(1))
    with pytest.raises(RuntimeError, match="cannot"):
        retirement.completed(1)
    assert retirement.completed(1) == 1
    assert freed == [1]


def test_a_free_may_defer_more():
    retirement, freed = Retirement(), []
    retirement.defer(1, lambda: retirement.defer(2, lambda: freed.append(2)))
    assert retirement.completed(1) == 1
    assert freed == []
    assert retirement.completed(2) == 1
    assert freed == [2]
