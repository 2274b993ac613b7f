"""Parts stay in host memory until others need the room, the least valuable leaving first."""

import numpy as np

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, SiteWeights
from serving.lora_server import host_parts
from serving.lora_server.host_parts import HostParts

PART_BYTES = 2 * 6 * 4  # two matrices of six numbers


def part(digest):
    a, b = np.zeros((1, 2, 3), np.float32), np.zeros((1, 2, 3), np.float32)
    sites = {("q_proj", 0): SiteWeights(a, b, 1.0), ("q_proj", 1): SiteWeights(a, b, 1.0)}
    return AdapterWeights(
        sites, AdapterReport(AdapterKind.LORA, "x", digest, {}, 0, 0, {}, 2, 4, None, None)
    )


def test_of_equal_ones_the_longest_unused_leaves_for_room():
    parts = HostParts(2 * PART_BYTES)
    one, two, three = part("one"), part("two"), part("three")
    parts.put(one)
    parts.put(two)
    assert parts.get("one") is one
    assert parts.num_bytes == 2 * PART_BYTES
    parts.put(three)
    assert parts.get("two") is None
    assert parts.get("one") is one
    assert parts.get("three") is three


def test_what_is_used_often_stays_though_others_were_used_since():
    parts = HostParts(2 * PART_BYTES)
    parts.put(part("often"))
    for _ in range(5):
        assert parts.get("often") is not None
    for number in range(3):
        parts.put(part(f"once{number}"))
    assert parts.get("often") is not None
    assert parts.get("once0") is None


def test_a_part_that_comes_twice_counts_once():
    parts = HostParts(2 * PART_BYTES)
    for _ in range(3):
        parts.put(part("one"))
    assert parts.num_bytes == PART_BYTES


def test_a_part_that_comes_again_is_the_last_to_leave():
    parts = HostParts(2 * PART_BYTES)
    for digest in ("one", "two", "one", "three"):
        parts.put(part(digest))
    assert parts.get("two") is None
    assert parts.get("one") is not None
    assert parts.num_bytes == 2 * PART_BYTES


def test_what_is_larger_than_all_is_not_kept():
    parts = HostParts(PART_BYTES - 1)
    parts.put(part("one"))
    assert parts.get("one") is None
    assert parts.num_bytes == 0


def expecting(byte_budget):
    parts = HostParts(byte_budget)
    for digest in ("one", "two", "three"):
        parts.expect(digest)
    return parts


def test_parts_that_are_held_stay_within_the_same_bytes_and_leave_when_they_are_released():
    parts = expecting(2 * PART_BYTES)
    parts.put(part("kept"))
    one, two = part("one"), part("two")
    assert parts.hold(one)
    assert parts.hold(two)
    assert parts.get("kept") is None
    assert not parts.hold(part("three"))  # whose bytes would lie beside the bound
    parts.put(part("three"))
    assert parts.num_bytes == 2 * PART_BYTES
    assert (parts.held("one"), parts.held("two"), parts.held("three")) == (one, two, None)
    parts.release("one")
    assert parts.held("one") is None
    assert parts.get("one") is one  # as one of the others
    assert parts.hold(part("three"))
    assert parts.get("one") is None
    parts.release("two")
    parts.release("three")
    parts.release("three")
    assert not parts.any_held
    assert parts.num_bytes == 2 * PART_BYTES


def test_one_that_is_larger_than_all_is_held_alone():
    parts = expecting(PART_BYTES - 1)
    assert parts.hold(part("one"))
    assert parts.hold(part("one"))
    assert not parts.hold(part("two"))
    assert parts.num_bytes == PART_BYTES
    parts.release("one")
    assert parts.num_bytes == 0
    assert parts.hold(part("two"))


def test_uses_are_known_of_so_many_that_left_and_of_all_that_are_back(monkeypatch):
    monkeypatch.setattr(host_parts, "_MOST_GONE", 2)
    parts = HostParts(PART_BYTES)
    for digest in ("one", "two", "three", "four", "two", "five", "six"):
        parts.put(part(digest))
    known = [d for d in ("one", "two", "three", "four", "five", "six") if parts._ledger.last_use(d)]
    assert known == ["two", "five", "six"]
    assert parts.get("six") is not None


def test_a_part_whose_load_was_given_up_while_it_was_read_is_not_held():
    parts = HostParts(2 * PART_BYTES)
    parts.expect("late")
    parts.release("late")
    assert not parts.hold(part("late"))
    assert not parts.any_held
    assert parts.get("late") is not None  # as one of the others
    parts.expect("late")
    assert parts.hold(part("late"))
