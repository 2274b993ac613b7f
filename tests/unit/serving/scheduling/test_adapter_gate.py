import pytest
from support.doubles.fake_device import FakeResidency

from serving.api.request import Request, Sequence
from serving.api.sampling import Sampling
from serving.scheduling.adapter_gate import AdapterGate, NoAdapters

WAIT_S = 10.0


def make(number: int, adapter: str) -> Sequence:
    request = Request(
        request_id=f"r{number}",
        prompt_ids=(1,),
        sampling=Sampling(),
        adapter=adapter or None,
        adapter_digest=adapter,
        on_output=lambda delta: None,
        arrival_s=0.0,
        deadline_s=0.0,
    )
    return Sequence(request=request, index=0, seed=0, token_ids=[1], number=number)


class Gate:
    """A gate over two slots, with adapters a and b resident."""

    def __init__(self, wait_s: float = WAIT_S):
        self.residency = FakeResidency(2, ticks=1)
        self.gate = AdapterGate(self.residency, wait_s)
        for adapter in ("a", "b"):
            self.residency.acquire(adapter)
        self.residency.tick()

    def round(self, now: float, *sequences: Sequence) -> list[bool]:
        self.residency.tick()
        self.gate.start_round()
        return [self.gate.enter(sequence, now) for sequence in sequences]


def test_base_needs_no_slot_and_a_resident_adapter_gives_its_own():
    fixture = Gate()
    base, on_b = make(0, ""), make(1, "b")
    assert fixture.round(0.0, base, on_b) == [True, True]
    assert (base.slot, on_b.slot) == (-1, fixture.residency.slot_of("b"))
    fixture.gate.check_integrity([base, on_b])


def test_a_miss_waits_and_enters_when_loaded():
    fixture = Gate()
    miss = make(0, "c")
    assert fixture.round(0.0, miss) == [False]
    assert fixture.gate.is_waiting(miss)
    assert fixture.round(1.0, miss) == [True]
    assert not fixture.gate.is_waiting(miss)


def test_a_miss_is_late_for_a_tenth_of_a_second_or_until_it_enters():
    fixture = Gate()
    first, second = make(0, "c"), make(1, "d")
    fixture.round(0.0, first)
    fixture.round(0.05, second)
    assert fixture.gate.late(0.09) == {first, second}
    assert fixture.gate.late(0.14) == {second}
    assert fixture.gate.late(0.16) == frozenset()
    fixture.gate.forget(second)
    assert fixture.gate.late(0.09) == {first}


def test_one_adapter_is_asked_for_once_a_round(monkeypatch):
    fixture, asked = Gate(), []
    acquire = fixture.residency.acquire
    monkeypatch.setattr(fixture.residency, "acquire", lambda a: asked.append(a) or acquire(a))
    waiting = make(0, "c"), make(1, "c")
    assert fixture.round(0.0, *waiting) == [False, False]
    assert asked == ["c"]
    assert fixture.residency.loads == ["a", "b", "c"]
    assert fixture.round(1.0, *waiting) == [True, True]  # each is counted as a user of it
    assert asked == ["c"] * 3


def test_leaving_lets_the_adapter_go_and_is_for_holders_only():
    fixture = Gate()
    on_a = make(0, "a")
    fixture.round(0.0, on_a)
    fixture.gate.leave(on_a)
    fixture.gate.leave(on_a)
    assert fixture.residency.users == {"a": 0}
    fixture.gate.check_integrity([])


def test_expiry_counts_from_the_first_miss():
    fixture = Gate()
    users = [make(0, "a"), make(1, "b")]
    waiter = make(2, "c")
    fixture.round(0.0, *users)
    fixture.round(3.0, waiter)
    fixture.round(8.0, waiter)
    assert fixture.gate.expired(3.0 + WAIT_S - 0.1) == []
    assert fixture.gate.expired(3.0 + WAIT_S) == [waiter]
    fixture.gate.forget(waiter)
    assert fixture.gate.expired(99.0) == []


def test_hits_pass_until_half_of_the_wait_is_over_then_the_least_used_adapter_is_drained():
    fixture = Gate()
    fixture.round(0.0, make(0, "a"), make(1, "a"), make(2, "b"))
    waiter = make(10, "c")
    assert fixture.round(0.0, waiter, make(11, "a"), make(12, "b")) == [False, True, True]
    late = fixture.round(WAIT_S / 2, waiter, make(13, "a"), make(14, "b"))
    assert late == [False, True, False]


def test_a_long_wait_is_passed_for_30_s_only():
    fixture = Gate(600.0)
    fixture.round(0.0, make(0, "a"), make(2, "b"))
    waiter = make(10, "c")
    assert fixture.round(0.0, waiter, make(11, "a"), make(12, "b")) == [False, True, True]
    assert fixture.round(29.0, waiter, make(13, "a"), make(14, "b")) == [False, True, True]
    assert False in fixture.round(30.0, waiter, make(15, "a"), make(16, "b"))[1:]
    assert fixture.gate.expired(599.0) == []


def test_draining_ends_with_the_waiter_and_spares_earlier_deadlines():
    fixture = Gate()
    holder = make(1, "b")
    fixture.round(0.0, make(0, "a"), make(2, "a"), holder)
    waiter, earlier, later = make(10, "c"), make(5, "b"), make(11, "b")
    fixture.round(0.0, waiter)
    fixture.round(WAIT_S / 2, waiter)
    assert fixture.round(WAIT_S / 2, earlier, waiter, later) == [True, False, False]
    for sequence in (earlier, holder):
        fixture.gate.leave(sequence)
    fixture.round(6.0, waiter, later)  # the load starts in the place of b
    assert fixture.residency.is_loading("c")
    assert fixture.round(7.0, waiter) == [True]
    assert fixture.residency.loads == ["a", "b", "c"]
    fixture.gate.leave(waiter)
    fixture.round(8.0, later)  # nobody is drained any more: b may be loaded again
    assert fixture.residency.loads == ["a", "b", "c", "b"]


def test_a_late_hit_of_a_drained_adapter_does_not_keep_an_earlier_one_out():
    """`hold` walks line after line, so that a later deadline may come first."""
    fixture = Gate()
    holder = make(1, "b")
    fixture.round(0.0, make(0, "a"), make(2, "a"), holder)
    waiter, earlier, later = make(10, "c"), make(5, "b"), make(11, "b")
    fixture.round(0.0, waiter)
    fixture.round(WAIT_S / 2, waiter)
    fixture.gate.leave(holder)
    fixture.gate.start_round()
    fixture.gate.hold([later, earlier], 2)
    assert fixture.residency.protected == {"b"}
    assert not fixture.gate.is_waiting(later)


def test_holding_an_adapter_is_no_use_of_it_and_lasts_until_the_next_call():
    fixture = Gate()
    waiting = [make(0, "c"), make(1, "a"), make(2, "a"), make(3, "b")]
    fixture.round(0.0, make(9, "b"))
    order = list(fixture.residency.order)
    fixture.gate.hold(waiting, 2)
    assert fixture.residency.protected == {"a"}, "b has a user, c is not there"
    assert (fixture.residency.users, fixture.residency.order) == ({"b": 1}, order)
    assert fixture.round(0.0, waiting[0]) == [False]
    assert fixture.residency.loads == ["a", "b"], "c takes nobody's place"
    fixture.gate.hold(waiting, 0)
    assert not fixture.residency.protected
    assert fixture.round(0.0, waiting[0]) == [False]
    assert fixture.residency.loads == ["a", "b", "c"]


def test_an_adapter_that_is_taken_from_its_last_user_is_held_for_nobody():
    fixture = Gate()
    on_a, on_b, waiter = make(1, "a"), make(2, "b"), make(3, "c")
    fixture.gate.hold([on_a, on_b], 2)
    fixture.round(0.0, on_a, on_b)
    fixture.gate.leave(on_a)
    assert fixture.residency.protected == {"b"}
    assert fixture.round(1.0, waiter) == [False]
    assert fixture.residency.loads == ["a", "b", "c"], "it would have left for nothing"


def test_a_waiter_that_went_away_drains_nobody():
    fixture = Gate()
    fixture.round(0.0, make(0, "a"), make(1, "b"))
    waiter = make(10, "c")
    fixture.round(0.0, waiter)
    fixture.round(WAIT_S / 2, waiter)
    fixture.gate.forget(waiter)
    assert fixture.round(6.0, make(11, "a"), make(12, "b")) == [True, True]


def test_without_adapters_a_digest_is_an_error():
    gate = AdapterGate(NoAdapters(), WAIT_S)
    assert gate.enter(make(0, ""), 0.0)
    with pytest.raises(ValueError, match="serves no adapters"):
        gate.enter(make(1, "a"), 0.0)


def test_patience_counts_from_the_first_miss_and_not_from_the_clocks_beginning():
    fixture, miss = Gate(), make(2, "c")
    assert fixture.round(100.0, make(0, "a"), make(1, "b"), miss) == [True, True, False]
    for now, starving in ((101.0, False), (104.9, False), (105.0, True)):
        assert fixture.round(now, miss) == [False]
        assert fixture.gate.is_starving == starving
