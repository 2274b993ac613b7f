"""Adapters that are used often, small and slow to read stay; popularity may drift."""

import random

import pytest

from lora_jax.adapters.host_memory.room import HostCopy, least_valuable
from lora_jax.adapters.host_memory.use_ledger import UseLedger, read_seconds


def test_uses_bytes_and_the_level_make_the_value():
    ledger = UseLedger()
    for digest in ("often", "often", "once", "large"):
        ledger.used(digest)
    often, once = ledger.value("often", 1000), ledger.value("once", 1000)
    assert often == 2 * once
    assert ledger.value("large", 10**9) < once
    assert ledger.value("never", 1000) == 0
    assert ledger.last_use("large") == 4
    ledger.evicted("often", 1000)
    assert ledger.level == often
    ledger.used("new")
    assert ledger.value("new", 1000) == often + once
    ledger.forget("new")
    assert ledger.last_use("new") == 0


def test_reads_are_told_once_and_counts_are_halved():
    ledger = UseLedger()
    ledger.used("a")
    ledger.read("a")
    assert ledger.take_read("a")
    assert not ledger.take_read("a")
    before = ledger.value("a", 10**8)
    for _ in range(998):
        ledger.used("b")
    assert ledger.value("a", 10**8) == before
    ledger.used("b")
    assert ledger.value("a", 10**8) == before / 2


def test_counts_of_many_adapters_are_halved_later():
    ledger = UseLedger()
    for number in range(100):
        ledger.used(str(number))
    before = ledger.value("0", 10**8)
    for _ in range(1499):
        ledger.used("99")
    assert ledger.value("0", 10**8) == before
    ledger.used("99")
    assert ledger.value("0", 10**8) == before / 2


def simulated(policy_value):
    """Hits of 3,000 requests, Zipf 1.0 over 120 adapters of ranks 8 to 128, room for a tenth."""
    rng = random.Random(7)
    sizes = [rng.choice((8, 16, 32, 64, 128)) * 10_000 for _ in range(120)]
    room, held, hits, misses_s = sum(sizes) // 10, {}, 0, 0.0
    ledger = UseLedger()
    weights = [1 / (n + 1) for n in range(120)]
    asked = rng.choices(range(120), weights, k=3000)
    for place in asked:
        name, size = str(place), sizes[place]
        hits += name in held
        if name not in held:
            misses_s += 0.005 + size / 500e6
            copies = [
                HostCopy(d, held[d], ledger.last_use(d), value=policy_value(ledger, d, held[d]))
                for d in held
            ]
            beyond = sum(held.values()) + size - room
            for victim in least_valuable(copies, beyond, 0) or ():
                ledger.evicted(victim.digest, victim.num_bytes)
                del held[victim.digest]
            held[name] = size
        ledger.used(name)
    return hits / len(asked), misses_s


def test_more_requests_hit_than_with_the_longest_unused_first():
    """A tenth of the bytes; the shares are those of the seed."""
    gdsf, gdsf_s = simulated(lambda ledger, d, size: ledger.value(d, size))
    lru, lru_s = simulated(lambda ledger, d, size: 0.0)
    assert gdsf > 1.1 * lru, (gdsf, lru)
    assert gdsf_s < 0.95 * lru_s


@pytest.mark.parametrize(("digests", "each"), [(1, 1000), (100, 1600)])
def test_counts_are_halved_after_1000_uses_or_16_for_each_digest(digests, each):
    ledger, halved = UseLedger(), []
    for number in range(1, 3 * each):
        ledger.used(str(number % digests))
        if ledger.num_halvings > len(halved):
            halved.append(number)
    assert halved == [each, 2 * each]


def test_a_read_takes_time_to_open_and_time_for_its_bytes():
    assert read_seconds(0) == pytest.approx(0.005)
    assert read_seconds(500_000_000) == pytest.approx(1.005)
    ledger = UseLedger()
    for digest in ("small", "large"):
        ledger.used(digest)
    assert ledger.value("small", 10**6) > ledger.value("large", 10**9) > 0  # a byte costs less


def test_weights_without_a_name_leave_nothing_behind():
    ledger = UseLedger()
    ledger.used("one")
    ledger.read("one")
    ledger.forget("one")
    assert (ledger.last_use("one"), ledger.take_read("one")) == (0, False)
