"""Adapter loading in small steps, and eviction of idle adapters."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.cases import adapter_cases as cases
from support.drivers.registry_changes import follow

from lora_jax.adapters.kinds import AdapterKind
from lora_jax.adapters.lora_allocator import SlotAllocator
from lora_jax.adapters.lora_load_job import LoadFailed
from lora_jax.adapters.registry import AdapterEntry
from lora_jax.adapters.slots import init_slots, size_slots
from serving.loading.adapter_loader import RETRY_S, AdapterLoader
from serving.loading.known_adapter import RATE_S

CATALOGUE = cases.llama(hidden=8, inner=6, vocab=10)
RANK, SLOTS = 4, 2


def entry(name, *, pinned=False, seed=None):
    weights = cases.weights(CATALOGUE, RANK, seed or ord(name), f"digest-{name}-{seed}")
    return AdapterEntry(name, AdapterKind.LORA, weights.digest, 1, weights, pinned, name)


class Case:
    """A loader over two slots, its device slots, and the seconds its loads took."""

    def __init__(self, num_slots=SLOTS, more_slots=0):
        spec = size_slots(CATALOGUE, num_slots, RANK, 4)
        spec = dataclasses.replace(spec, num_slots=num_slots + more_slots)
        self.allocator = SlotAllocator(CATALOGUE, spec.num_slots, spec.rows)
        self.slots = init_slots(CATALOGUE, spec, jnp.dtype(jnp.float32))
        self.seconds = []
        self.now = 0.0
        self.loader = AdapterLoader(
            self.allocator, on_loaded=self.seconds.append, clock=lambda: self.now
        )

    def advance(self, chunks=1000):
        self.slots = self.loader.advance(self.slots, chunks)

    def bring(self, one):
        """Make an adapter resident through a request, and return its slot."""
        self.loader.retain(one)
        assert self.loader.acquire(one.digest) is None
        self.advance()
        slot = self.loader.acquire(one.digest)
        assert slot is not None
        return slot

    def leave(self, one):
        self.loader.release(one.digest)
        self.loader.drop(one.digest)

    def scaling(self, slot):
        return np.asarray(self.slots.scaling)[:, :, slot]


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


class Broken:
    """A job that fails at its first write, as long as the case says so."""

    def __init__(self, case, error):
        self.case, self.error, self.remaining, self.done = case, error, 1, False

    def advance(self, state, max_chunks):
        if self.case.broken:
            raise self.error
        self.remaining, self.done = 0, True
        return state


class FaultyCase(Case):
    """Loads fail while `broken`; `now` is the loader's clock."""

    def __init__(self, num_slots=SLOTS, *, may_pass=True):
        super().__init__(num_slots)
        self.broken, self.now = True, 100.0
        error = LoadFailed("no memory", may_pass=may_pass)
        self.loader = AdapterLoader(
            self.allocator, lambda placement, state: Broken(self, error), clock=lambda: self.now
        )


def test_a_failed_load_with_nothing_to_wait_for_is_reported_and_tried_again_later(caplog):
    case, one = FaultyCase(), entry("a")
    case.loader.retain(one)
    assert case.loader.acquire(one.digest) is None
    case.advance()
    assert case.loader.take_failures() == [(one.digest, "no memory")]
    assert case.loader.take_failures() == []
    assert (case.loader.is_busy, case.loader.snapshot.slots_used) == (False, 0)
    assert "Adapter digest-a-Non could not be loaded: no memory" in caplog.text
    case.broken = False
    assert case.loader.acquire(one.digest) is None
    assert not case.loader.is_busy  # not yet
    case.now += RETRY_S
    case.bring(one)
    case.leave(one)
    case.loader.check_integrity()


def test_an_idle_adapter_goes_for_a_load_that_somebody_waits_for():
    case, idle, one = FaultyCase(), entry("a"), entry("b")
    case.broken = False
    follow(case.loader, [idle])
    case.advance()
    case.broken = True
    case.loader.retain(one)
    case.loader.acquire(one.digest)
    case.advance()
    assert case.loader.take_failures() == []
    assert case.loader.snapshot.resident == frozenset()
    case.broken = False
    case.bring(one)  # at once
    case.leave(one)


def test_a_prefetch_that_fails_throws_nobody_out():
    case, idle, named = FaultyCase(), entry("a"), entry("b")
    case.broken = False
    follow(case.loader, [idle])
    case.advance()
    case.broken = True
    follow(case.loader, [idle, named])
    case.advance()
    case.loader.look_again()
    assert not case.loader.is_busy
    assert case.loader.snapshot.resident == {idle.digest}
    assert case.loader.take_failures() == []


def test_while_others_are_in_use_a_failed_load_waits_for_them():
    case, used, one = FaultyCase(), entry("a"), entry("b")
    case.broken = False
    case.bring(used)
    case.broken = True
    case.loader.retain(one)
    case.loader.acquire(one.digest)
    case.advance()
    assert case.loader.take_failures() == []
    assert case.loader.snapshot.resident == {used.digest}
    case.leave(used)
    case.broken = False
    case.now += RETRY_S
    case.bring(one)
    case.leave(one)


def test_memory_that_is_on_its_way_back_is_waited_for(monkeypatch):
    """Of adapters that have left while a step may read them: nobody is resident any more."""
    case, one = FaultyCase(), entry("a")
    kind = type(case.allocator)
    monkeypatch.setattr(kind, "num_leaving", 1)
    case.loader.retain(one)
    assert case.loader.acquire(one.digest) is None
    case.advance()
    assert case.loader.take_failures() == []
    monkeypatch.setattr(kind, "num_leaving", 0)
    case.now += RETRY_S
    assert case.loader.acquire(one.digest) is None
    case.advance()
    assert case.loader.take_failures() == [(one.digest, "no memory")]
    case.loader.drop(one.digest)


def test_room_that_was_freed_is_for_who_waits_not_for_who_is_asked_for_most():
    """An adapter that went for another's sake came back before it, and went again, for ever."""
    case, often, one = Case(1), entry("a"), entry("b")
    follow(case.loader, [often, one])
    for _ in range(3):
        case.loader.retain(often)
    case.advance()
    for _ in range(3):
        case.loader.drop(often.digest)
    case.loader.retain(one)
    assert case.allocator.evict_idle()
    case.loader._publish()
    case.loader.look_again(freed=True)
    case.advance()
    assert case.loader.snapshot.resident == {one.digest}
    case.loader.drop(one.digest)


def test_who_lacked_memory_comes_first_when_it_is_back(monkeypatch):
    """The idle adapter that went for its sake has a name, but may not return before it."""
    case, idle, one = FaultyCase(), entry("a"), entry("b")
    case.broken = False
    follow(case.loader, [idle])
    case.advance()
    case.broken = True
    case.loader.retain(one)
    case.loader.acquire(one.digest)
    case.advance()
    case.broken = False
    with monkeypatch.context() as leaving:
        leaving.setattr(type(case.allocator), "num_leaving", 1)
        case.loader.look_again()
        assert case.loader.acquire(one.digest) is None
        assert not case.loader.is_busy  # neither of them
    case.bring(one)
    case.loader.look_again()
    case.advance()
    assert case.loader.snapshot.resident == {idle.digest, one.digest}
    case.leave(one)


def test_an_error_that_will_not_pass_is_reported_whoever_else_is_there():
    case, used, one = FaultyCase(may_pass=False), entry("a"), entry("b")
    case.broken = False
    follow(case.loader, [used])
    case.advance()
    case.broken = True
    case.loader.retain(one)
    case.loader.acquire(one.digest)
    case.advance()
    assert case.loader.take_failures() == [(one.digest, "no memory")]
    assert case.loader.snapshot.resident == {used.digest}
    case.loader.drop(one.digest)


def test_a_failed_load_that_nobody_needs_any_more_is_forgotten():
    case, one = FaultyCase(), entry("a")
    follow(case.loader, [one])
    follow(case.loader, [])
    case.advance()
    assert case.loader.take_failures() == []
    assert not case.loader.knows(one.digest)
    case.loader.check_integrity()


def test_a_pinned_adapter_that_lacked_memory_comes_when_there_is_some():
    case, used, pinned = FaultyCase(), entry("a"), entry("b", pinned=True)
    case.broken = False
    case.bring(used)
    case.broken = True
    follow(case.loader, [pinned])
    case.advance()
    assert pinned.digest not in case.loader.snapshot.resident
    case.broken = False
    case.now += RETRY_S
    case.loader.look_again()
    case.advance()
    assert pinned.digest in case.loader.snapshot.resident
    case.leave(used)
