"""ESFT slots and expert indices: a random walk against plain sets, and the rules one by one."""

import dataclasses
import random

import numpy as np
import pytest
from support.doubles.faulty_memory import counting_memory

from bench import expert_cases as cases
from bench.esft_memory import MultiEsftMemory
from lora_jax.adapters.esft_allocator import ExpertAllocator, ExpertSizes
from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.weights import AdapterReport, ExpertWeights

LAYERS, EXPERTS, MOST, SLOTS, BYTES = (1, 2, 5), 6, 3, 4, 10
SIZES = ExpertSizes(LAYERS, EXPERTS, MOST, BYTES)


def weights(digest, experts):
    report = AdapterReport(AdapterKind.ESFT, "made", digest, {}, 0, 0, {}, 0, 0, None, None)
    matrices = (np.zeros((1, 1), np.float32),) * 3
    return ExpertWeights({n: dict.fromkeys(ids, matrices) for n, ids in experts.items()}, report)


def resident(allocator, one, **options):
    placement = allocator.place(one, **options)
    allocator.finish_loading(one.digest)
    return placement


def leave(allocator):
    for placement in allocator.take_left():
        allocator.reclaim(placement)


def test_the_table_names_the_indices_and_the_base_for_the_rest():
    allocator = ExpertAllocator(2, SIZES)
    placement = allocator.place(weights("a", {1: (0, 4), 5: (3,)}))
    assert placement.indices == {1: {0: 6, 4: 7}, 5: {3: 6}}
    assert placement.places == ((1, 6), (1, 7), (5, 6))
    assert placement.table.tolist() == [[6, 1, 2, 3, 7, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 4, 5]]
    assert allocator.slot_of("a") is None
    assert allocator.is_loading("a")
    other = allocator.place(weights("b", {1: (0,), 2: (1,)}))
    assert (placement.slot, other.slot) == (0, 1)
    assert other.indices == {1: {0: 8}, 2: {1: 6}}
    allocator.check_integrity()


def test_what_leaves_is_free_only_when_reclaimed():
    allocator = ExpertAllocator(1, SIZES)
    first = resident(allocator, weights("a", {1: (0, 1, 2)}))
    allocator.retire("a")
    second = weights("b", {1: (5,)})
    assert allocator.resident() == ()
    assert not allocator.can_place(second)
    assert not allocator.make_room(second)
    assert (allocator.stats().slots_used, allocator.stats().bytes_used) == (1, 3 * BYTES)
    assert allocator.take_left() == [first]
    assert allocator.take_left() == []
    assert allocator.num_leaving == 1
    allocator.check_integrity()
    allocator.reclaim(first)
    assert allocator.make_room(second)
    assert allocator.place(second).indices == {1: {5: 6}}
    assert allocator.stats().bytes_used == BYTES
    with pytest.raises(ValueError, match="no room"):
        allocator.place(second)


def test_idle_ones_go_least_recently_used_first_one_at_a_time():
    allocator = ExpertAllocator(3, SIZES)
    for name in "abc":
        resident(allocator, weights(name, {1: (0,)}), pinned=name == "c")
    allocator.acquire("a")
    allocator.release("a")
    assert not allocator.make_room(weights("d", {2: (0,)}))
    assert allocator.resident() == ("c", "a")
    assert not allocator.make_room(weights("d", {2: (0,)}))  # one leaves already
    assert allocator.resident() == ("c", "a")
    leave(allocator)
    assert allocator.make_room(weights("d", {2: (0,)}))
    allocator.place(weights("d", {2: (0,)}))
    allocator.acquire("a")
    assert not allocator.make_room(weights("e", {2: (0,)}))
    assert not allocator.num_leaving  # pinned, in use, loading: nobody can go
    assert not allocator.evict_idle()
    allocator.check_integrity()


def test_slots_may_be_more_than_there_are_indices():
    """A layer without enough of them makes its adapter wait for another's."""
    sizes = dataclasses.replace(SIZES, extra=4)
    allocator = ExpertAllocator(SLOTS, sizes)
    assert allocator.stats().bytes_total == 4 * len(LAYERS) * BYTES
    resident(allocator, weights("a", {1: (0, 1, 2)}))
    resident(allocator, weights("b", {1: (3,), 2: (0, 1, 2)}))
    third = weights("c", {1: (5,)})
    assert not allocator.can_place(third)
    assert not allocator.make_room(third)
    assert allocator.resident() == ("b",)
    leave(allocator)
    assert allocator.place(third).indices == {1: {5: 6}}
    allocator.check_integrity()
    with pytest.raises(ValueError, match="2 indices do not hold an adapter of 3 experts"):
        ExpertAllocator(SLOTS, dataclasses.replace(SIZES, extra=2))


def test_loads_given_up_leave_like_all_others():
    allocator = ExpertAllocator(1, SIZES)
    placement = allocator.place(weights("a", {1: (0,)}))
    assert allocator.abandon_loading("a") == 0
    assert allocator.take_left() == [placement]
    allocator.reclaim(placement)
    assert allocator.can_place(weights("a", {1: (0,)}))


def test_limits_name_both_numbers():
    allocator = ExpertAllocator(2, SIZES)
    allocator.check_fits(weights("a", {1: (0, 1, 2)}))
    with pytest.raises(
        ValueError, match=r"replaces 4 experts in layer 2; .* room for 3 .*experts\)"
    ):
        allocator.check_fits(weights("a", {1: (0,), 2: (0, 1, 2, 3)}))
    tight = ExpertAllocator(2, ExpertSizes(LAYERS, EXPERTS, MOST, BYTES, byte_budget=30))
    with pytest.raises(ValueError, match=r"experts take 40 bytes; the server has 30 "):
        tight.check_fits(weights("a", {1: (0, 1), 2: (0, 1)}))
    resident(tight, weights("a", {1: (0, 1)}))
    two = weights("b", {1: (0, 1)})
    assert not tight.make_room(two)
    leave(tight)
    assert tight.make_room(two)
    assert tight.stats().bytes_total == 30
    with pytest.raises(ValueError, match="at least 1 slot"):
        ExpertAllocator(0, SIZES)


def test_a_random_walk_keeps_its_books():
    rng, allocator = random.Random(3), ExpertAllocator(SLOTS, SIZES)
    loading, idle, left = {}, {}, []
    for step in range(2000):
        action = rng.randrange(5)
        if action == 0:
            layers = rng.sample(LAYERS, rng.randint(1, 3))
            chosen = {n: tuple(rng.sample(range(EXPERTS), rng.randint(1, MOST))) for n in layers}
            one = weights(str(step), chosen)
            if allocator.can_place(one):
                loading[one.digest] = allocator.place(one)
            else:
                assert len(loading) + len(idle) + len(left) == SLOTS  # a free slot always has room
        elif action == 1 and loading:
            digest = rng.choice(sorted(loading))
            allocator.finish_loading(digest)
            idle[digest] = loading.pop(digest)
        elif action == 2 and idle:
            digest = rng.choice(sorted(idle))
            allocator.retire(digest)
            left.append(idle.pop(digest))
        elif action == 3 and loading:
            digest = rng.choice(sorted(loading))
            allocator.abandon_loading(digest)
            left.append(loading.pop(digest))
        elif action == 4 and left:
            taken = allocator.take_left()
            assert set(taken) == set(left)
            for placement in left:
                allocator.reclaim(placement)
            left = []
        allocator.check_integrity()
        held = [*loading.values(), *idle.values(), *left]
        places = [place for placement in held for place in placement.places]
        assert len(set(places)) == len(places)
    assert step > 1000


COUNTS = cases.table_1_counts()  # of ExpertWeave's Table 1
TRUE = sum(int(counts.sum()) for counts in COUNTS.values())


def multi_esft(layers=cases.LAYERS):
    return MultiEsftMemory(counting_memory(cases.PAGE)[0], len(COUNTS), layers)


def test_ten_adapters_cost_at_most_three_percent_over_their_own_bytes():
    room = multi_esft()
    for name, counts in COUNTS.items():
        room.load(name, counts)
    ours = room.overhead(TRUE)
    assert 1.0 <= ours <= 1.01
    with_base = room.bytes / ((cases.LAYERS * cases.BASE + TRUE) * cases.EXPERT_BYTES)
    assert 1.0 <= with_base <= ours


@pytest.mark.parametrize(("most", "factor"), [("own", 1.551), ("global", 1.996)])
def test_padding_costs_what_the_paper_counts(most, factor):
    room = multi_esft(layers=2)  # all layers are alike
    for name, (own, _) in cases.TABLE_1.items():
        room.load(name, np.full(2, own if most == "own" else cases.E_MAX))
    assert room.overhead(TRUE * 2 / cases.LAYERS) == pytest.approx(factor, rel=0.005)


def test_fragmentation_stays_low_while_adapters_come_and_go():
    """80 random changes; then all ten are there again, in whatever holes there were."""
    room, rng = multi_esft(layers=4), random.Random(1)
    counts = {name: c[:4] for name, c in COUNTS.items()}
    loaded: set[str] = set()
    worst = 1.0
    for _ in range(80):
        name = rng.choice(list(counts))
        if name in loaded:
            room.unload(name)
        else:
            room.load(name, counts[name])
        loaded ^= {name}
        if len(loaded) >= 5:
            worst = max(worst, room.overhead(sum(int(counts[n].sum()) for n in loaded)))
    assert worst <= 1.05
    for name in counts.keys() - loaded:
        room.load(name, counts[name])
    assert room.overhead(sum(int(c.sum()) for c in counts.values())) <= 1.03
    for name in counts:
        room.unload(name)
    assert room.bytes == room.base_bytes
