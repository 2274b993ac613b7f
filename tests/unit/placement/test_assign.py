"""Greedy assignment against the best one found by trying all."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_jax.placement.assign import assign, loads

LOADS = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=3), st.integers(0, 20).map(float), max_size=7
)


@settings(max_examples=60, deadline=None)
@given(load_of=LOADS, instances=st.integers(1, 3))
def test_near_the_best_possible(load_of, instances):
    got = assign(load_of, instances)
    assert set(got) == set(load_of)
    assert set(got.values()) <= set(range(instances))
    best = min(
        max(loads(load_of, dict(zip(load_of, places, strict=True)), instances))
        for places in itertools.product(range(instances), repeat=len(load_of))
    )
    worst = max(loads(load_of, got, instances))
    assert worst <= (4 / 3 - 1 / (3 * instances)) * best + 1e-9


@settings(max_examples=50, deadline=None)
@given(load_of=LOADS, instances=st.integers(1, 4), data=st.data())
def test_the_order_of_the_input_does_not_matter(load_of, instances, data):
    shuffled = dict(data.draw(st.permutations(list(load_of.items()))))
    assert assign(shuffled, instances) == assign(load_of, instances)


def test_heaviest_first():
    got = assign({"a": 1.0, "b": 5.0, "c": 4.0, "d": 3.0}, 2)
    assert got == {"b": 0, "c": 1, "d": 1, "a": 0}
    assert loads({"a": 1.0, "b": 5.0, "c": 4.0, "d": 3.0}, got, 2) == (6, 7)


def test_adapters_without_load_are_spread():
    assert assign(dict.fromkeys("abcd", 0.0), 2) == {"a": 0, "b": 1, "c": 0, "d": 1}


@pytest.mark.parametrize("load", [-1.0, float("nan"), float("inf")])
def test_impossible_loads_are_refused(load):
    with pytest.raises(ValueError, match="'x'"):
        assign({"x": load}, 1)


def test_no_instance_is_refused():
    with pytest.raises(ValueError, match="at least one instance"):
        assign({}, 0)
