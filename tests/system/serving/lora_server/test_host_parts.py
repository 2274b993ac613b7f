"""Parts stay in host memory until others need the room, the least valuable leaving first."""

import numpy as np

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport, AdapterWeights, SiteWeights
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
