"""Patterns of module names take a bounded number of steps."""

import time

import pytest

from lora_jax.adapters.formats.pattern_automaton import Budget
from lora_jax.adapters.formats.peft_pattern import Pattern


@pytest.mark.parametrize(
    "pattern",
    [".?" * 200 + "!", r"(.|\w)" * 80, "(a*)*b", "(a|a)*b", "(a+)+b", "(.*)*" * 9 + "b"],
)
def test_patterns_that_take_re_for_ever_take_milliseconds(pattern):
    start = time.thread_time()
    assert not Pattern(pattern).match("model." + "a" * 300)
    assert time.thread_time() - start < 1  # n = 24 of the first took `re` 4 s


def test_patterns_of_an_adapter_share_their_steps():
    budget = Budget(200_000)
    patterns = [Pattern("(.|a)*" * 20 + f"{i}", budget) for i in range(10)]
    with pytest.raises(ValueError, match="too many steps"):
        [pattern.match("a" * 200) for pattern in patterns]
