"""Adapter loading in small steps, and eviction of idle adapters."""

import numpy as np
import pytest
from support.cases.loader_cases import Case, entry
from support.drivers.registry_changes import follow

from serving.loading.adapter_loader import AdapterLoader
from serving.loading.known_adapter import RATE_S


def test_a_miss_loads_in_bounded_steps_and_then_hits():
    case, one = Case(), entry("a")
    case.loader.retain(one)
    assert case.loader.acquire(one.digest) is None
    assert case.loader.is_loading(one.digest)
    steps = 0
    while case.loader.is_busy:
        assert case.loader.acquire(one.digest) is None
        assert not case.loader.snapshot.resident
        assert not np.asarray(case.slots.entries).any()  # the table comes last
        case.advance(1)
        steps += 1
    assert steps > 2
    slot = case.loader.acquire(one.digest)
    assert slot is not None
    assert (case.scaling(slot) == 0.5 + ord("a")).all()
    assert case.loader.snapshot.resident == {one.digest}
    assert (case.loader.snapshot.swaps, len(case.seconds)) == (1, 1)
    case.leave(one)


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_loads_whose_bytes_are_on_their_way_let_others_begin(at_once):
    class Late:
        """A load whose bytes arrive when they are let."""

        arrived, begun = False, 0

        def __init__(self, placement, slots):
            self.remaining, self.done = 1, False
            jobs.append(self)

        def advance(self, slots, max_chunks):
            Late.begun += 1
            if Late.arrived:
                self.remaining, self.done = 0, True
            return slots

    jobs, case = [], Case(3)
    case.loader = AdapterLoader(case.allocator, Late, at_once=at_once)
    for name in "abc":
        case.loader.retain(entry(name))
        case.loader.acquire(entry(name).digest)
    case.advance()
    case.advance()
    assert (len(jobs), Late.begun) == (at_once, 2 * at_once)
    Late.arrived = True
    case.advance(2)
    assert len(case.loader.snapshot.resident) == 2  # the budget holds for all
    case.advance()
    assert len(case.loader.snapshot.resident) == len(jobs) == 3


def test_two_loads_share_one_budget_in_order():
    case, first, second = Case(), entry("a"), entry("b")
    for one in (first, second):
        case.loader.retain(one)
        case.loader.acquire(one.digest)
    while first.digest not in case.loader.snapshot.resident:
        assert case.loader.is_loading(second.digest)
        case.advance(2)
    assert case.loader.is_busy
    case.advance()
    assert case.loader.snapshot.resident == {first.digest, second.digest}


def test_a_full_device_waits_for_a_user_to_leave():
    case, one, two, three = Case(), entry("a"), entry("b"), entry("c")
    follow(case.loader, [one, two, three])
    case.advance()
    for used in (one, two):
        case.loader.retain(used)
        assert case.loader.acquire(used.digest) is not None
    case.loader.retain(three)
    assert case.loader.acquire(three.digest) is None
    assert not case.loader.is_busy
    case.leave(one)
    assert case.loader.acquire(three.digest) is None
    assert case.loader.is_loading(three.digest)
    case.advance()
    slot = case.loader.acquire(three.digest)
    assert (case.scaling(slot) == 0.5 + ord("c")).all()
    case.leave(two)
    case.leave(three)
    assert case.loader.snapshot.resident == {two.digest, three.digest}
    case.loader.check_integrity()


def test_named_adapters_enter_while_there_is_room_pinned_ones_first():
    case = Case()
    names = [entry("a"), entry("b"), entry("c", pinned=True)]
    follow(case.loader, names)
    case.advance()
    assert case.loader.snapshot.resident == {names[2].digest, names[0].digest}
    late = entry("d", pinned=True)
    follow(case.loader, [*names, late])  # takes the place of the idle unpinned one
    case.advance()
    assert case.loader.snapshot.resident == {names[2].digest, late.digest}
    case.loader.check_integrity()


def test_free_room_goes_to_the_adapter_that_most_requests_named_lately():
    case = Case()
    a, b, c, d, e = names = [entry(name) for name in "abcde"]

    def ask(one, times):  # callers that give up before it is there
        for _ in range(times):
            case.loader.retain(one)
            case.loader.drop(one.digest)

    follow(case.loader, names)
    case.advance()
    assert case.loader.snapshot.resident == {a.digest, b.digest}
    ask(d, 3)
    ask(c, 1)
    assert case.loader.snapshot.resident == {a.digest, b.digest}  # nobody leaves for them
    follow(case.loader, [b, c, d, e])
    case.advance()
    assert case.loader.snapshot.resident == {b.digest, d.digest}
    ask(c, 2)
    case.now += 3 * RATE_S  # now they count less than one request
    ask(e, 1)
    follow(case.loader, [c, d, e])
    case.advance()
    assert case.loader.snapshot.resident == {d.digest, e.digest}


def test_no_adapter_leaves_for_one_that_no_request_has_named_where_rows_are_short():
    case = Case(more_slots=2)
    a, b, c, d = (entry(name) for name in "abcd")
    follow(case.loader, [a, b])
    case.advance()
    follow(case.loader, [a, b, c])
    case.advance()
    assert case.loader.snapshot.resident == {a.digest, b.digest}
    follow(case.loader, [a, c, d])  # one of these takes the room of the one that has gone
    case.advance()
    assert case.loader.snapshot.resident == {a.digest, c.digest}
    case.bring(d)
    assert case.loader.snapshot.resident == {c.digest, d.digest}
    case.leave(d)
    case.loader.check_integrity()


def test_an_unloaded_adapter_stays_until_its_last_request_ends():
    case, one = Case(), entry("a")
    follow(case.loader, [one])
    case.advance()
    case.loader.retain(one)
    slot = case.loader.acquire(one.digest)
    follow(case.loader, [])
    assert case.loader.snapshot.resident == {one.digest}
    case.loader.release(one.digest)  # preempted: the request is not over
    assert case.loader.acquire(one.digest) == slot
    case.leave(one)
    assert case.loader.snapshot.resident == frozenset()
    assert case.loader.snapshot.slots_used == 0
    case.loader.check_integrity()


def test_old_weights_of_a_name_can_come_back_for_a_waiting_request():
    case, old, new = Case(1), entry("a", seed=1), entry("a", seed=2)
    case.loader.retain(old)
    follow(case.loader, [new])
    case.advance()
    assert case.loader.snapshot.resident == {new.digest}
    assert case.loader.acquire(old.digest) is None  # evicts the new ones, which nobody uses
    case.advance()
    slot = case.loader.acquire(old.digest)
    assert (case.scaling(slot) == 1.5).all()
    case.leave(old)
    assert case.loader.snapshot.resident == frozenset()


def test_weights_unloaded_while_they_load_are_freed():
    case, one = Case(), entry("a")
    follow(case.loader, [one])
    case.advance(1)
    assert case.loader.is_busy
    follow(case.loader, [])
    case.advance()
    assert case.loader.snapshot.slots_used == 0
    case.loader.check_integrity()
    case.bring(one)
    case.leave(one)


def test_integrity_notices_what_is_left():
    case, one = Case(), entry("a")
    follow(case.loader, [one])
    with pytest.raises(AssertionError, match="1 loads are left"):
        case.loader.check_integrity()
    case.advance()
    case.loader.retain(one)
    case.loader.acquire(one.digest)
    with pytest.raises(AssertionError, match="is in use"):
        case.loader.check_integrity()
