"""Loads that fail: who is told, who waits for memory, and what goes for its sake."""

from support.cases.loader_cases import SLOTS, Case, entry
from support.drivers.registry_changes import follow

from lora_jax.adapters.lora_load_job import LoadFailed
from serving.loading.adapter_loader import RETRY_S, AdapterLoader


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

    def fail_beside_idle(self, idle, wanted):
        """Load one that nobody uses, then fail to load one that is waited for."""
        self.broken = False
        follow(self.loader, [idle])
        self.advance()
        self.broken = True
        self.loader.retain(wanted)
        self.loader.acquire(wanted.digest)
        self.advance()


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
    case, one = FaultyCase(), entry("b")
    case.fail_beside_idle(entry("a"), one)
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
    case.fail_beside_idle(idle, one)
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
