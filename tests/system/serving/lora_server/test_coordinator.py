"""Evictions by the coordinator, over ranks that record their calls."""

import threading

import pytest
from support.waiting import wait_until

from serving.lora_server.coordinator import AT_ONCE, Coordinator, NoRoom
from serving.lora_server.lease_metrics import PartLoad


class Rank:
    """Holds up to `room` adapters; `fault` is raised by the next load."""

    def __init__(self, room: int = 100):
        self.room, self.held, self.versions, self.fault = room, {}, [], None
        self.took = PartLoad(0.25, 0.5)
        self.fetched, self.bad = {}, set()  # the latter: folders that are refused

    def fetch(self, folder, digest):
        if folder in self.bad:
            raise ValueError(f"{folder} is bad")
        assert digest not in self.fetched
        self.fetched[digest] = folder
        return PartLoad(0.0, 0.0)

    def forget(self, digest):
        self.fetched.pop(digest, None)

    def load(self, number, folder, digest, version):
        self.versions.append(version)
        if self.fault is not None:
            fault, self.fault = self.fault, None
            raise fault
        if folder in self.bad:
            raise ValueError(f"{folder} is bad")
        if len(self.held) >= self.room:
            raise ValueError("There is no room for the adapter now.")
        assert number not in self.held
        self.held[number] = (digest, folder)
        return self.took

    def unload(self, number, version):
        self.versions.append(version)
        self.held.pop(number, None)


@pytest.fixture
def ranks():
    return [Rank(), Rank()]


@pytest.fixture
def coordinator(ranks):
    made = Coordinator(ranks, num_adapters=2)
    yield made
    assert ranks[0].held == ranks[1].held, "the ranks hold different adapters"
    assert [rank.fetched for rank in ranks] == [{}, {}], "parts are kept for nobody"
    for rank in ranks:
        assert rank.versions == sorted(rank.versions)
    made.close()


def test_an_adapter_is_loaded_once_for_all_instances(coordinator, ranks):
    one = coordinator.lease("one", "d", "folder")
    two = coordinator.lease("two", "d", "folder")
    assert one.number == two.number
    assert ranks[0].held == {one.number: ("d", "folder")}
    assert len(ranks[0].versions) == 1
    assert coordinator.held() == {"d": {"one", "two"}}


def test_leases_count_by_tier_and_the_slowest_rank_says_how_long(coordinator, ranks):
    ranks[0].took, ranks[1].took = PartLoad(0.0, 0.125), PartLoad(0.25, 0.5)
    coordinator.lease("one", "d", "folder")
    coordinator.lease("two", "d", "folder")
    wait_until(lambda: coordinator.request("three", "d", "folder") is not None)
    ranks[1].took = PartLoad(0.0, 0.25)
    wait_until(lambda: coordinator.request("one", "e", "folder") is not None)
    sample = coordinator.metrics.registry.get_sample_value
    name = "lora_jax:lora_server"
    # The second load is counted behind its lease, seconds last.
    wait_until(lambda: sample(f"{name}_load_seconds_count") == 2)
    hits = [sample(f"{name}_tier_hits_total", {"tier": t}) for t in ("device", "host", "disk")]
    assert hits == [2, 1, 1]
    assert [sample(f"{name}_read_seconds_{part}") for part in ("count", "sum")] == [1, 0.25]
    assert [sample(f"{name}_load_seconds_{part}") for part in ("count", "sum")] == [2, 0.75]
    with pytest.raises(NoRoom):
        coordinator.lease("one", "f", "folder")
    assert sample(f"{name}_load_seconds_count") == 2


def test_what_is_leased_stays_and_the_longest_idle_goes(coordinator, ranks):
    first = coordinator.lease("one", "a", "A")
    coordinator.lease("one", "b", "B")
    with pytest.raises(NoRoom, match="All 2"):
        coordinator.lease("two", "c", "C")
    coordinator.release("one", "a")
    coordinator.release("one", "b")
    assert coordinator.lease("one", "a", "A").number == first.number  # still there: no load
    coordinator.release("one", "a")
    third = coordinator.lease("two", "c", "C")  # b has been idle for longer
    assert set(coordinator.held()) == {"a", "c"}
    assert set(ranks[0].held) == {first.number, third.number}


def test_a_number_is_never_given_twice(coordinator):
    seen = set()
    for turn in range(10):
        number = coordinator.lease("one", f"d{turn}", "").number
        coordinator.release("one", f"d{turn}")
        assert number not in seen
        seen.add(number)


def test_an_instance_that_leaves_gives_everything_back(coordinator):
    coordinator.lease("one", "a", "")
    coordinator.lease("one", "b", "")
    coordinator.lease("two", "b", "")
    coordinator.leave("one")
    assert coordinator.held() == {"a": set(), "b": {"two"}}
    coordinator.release("one", "never leased")


def test_files_that_one_rank_refuses_are_on_none(coordinator, ranks):
    ranks[1].fault = ValueError("tensor x is missing")
    with pytest.raises(ValueError, match="tensor x"):
        coordinator.lease("one", "a", "")
    assert not ranks[0].held
    assert not coordinator.held()
    assert coordinator.lease("one", "a", "").number in ranks[1].held


def test_a_rank_without_room_makes_idle_adapters_go(coordinator, ranks):
    ranks[1].room = 1
    coordinator.lease("one", "a", "")
    with pytest.raises(NoRoom):
        coordinator.lease("one", "b", "")
    coordinator.release("one", "a")
    coordinator.lease("one", "b", "")
    assert set(coordinator.held()) == {"b"}


def test_a_rank_that_is_lost_and_comes_back(coordinator, ranks):
    number = coordinator.lease("one", "a", "A").number
    coordinator.lose(1)
    with pytest.raises(ConnectionError):
        coordinator.lease("two", "a", "A")
    ranks[1] = Rank()
    coordinator.restore(1, ranks[1])
    assert ranks[1].held == {number: ("a", "A")}
    assert coordinator.lease("two", "a", "A").number == number


@pytest.mark.parametrize("leased", [True, False])
def test_a_rank_comes_back_without_an_adapter_whose_files_have_changed(coordinator, ranks, leased):
    """One folder that was changed or removed kept the rank, and so all adapters, away for ever."""
    number = coordinator.lease("one", "a", "A").number
    bad = coordinator.lease("one", "b", "B").number
    if not leased:
        coordinator.release("one", "b")
    coordinator.lose(1)
    ranks[1] = Rank()
    ranks[1].bad = ranks[0].bad = {"B"}
    coordinator.restore(1, ranks[1])
    assert ranks[1].held == ranks[0].held == {number: ("a", "A")}
    assert set(coordinator.held()) == {"a"}
    with pytest.raises(ValueError, match="B is bad"):
        coordinator.lease("one", "b", "B")
    for rank in ranks:
        rank.bad = set()
    assert coordinator.lease("one", "b", "B").number != bad
    coordinator.release("one", "b")


def test_a_rank_that_dies_while_it_loads(coordinator, ranks):
    ranks[0].fault = ConnectionError("gone")
    with pytest.raises(ConnectionError, match="not there"):
        coordinator.lease("one", "a", "")
    assert not coordinator.held()


def test_a_fault_nobody_expects_is_not_hidden(coordinator, ranks):
    ranks[0].fault = KeyError("oops")
    with pytest.raises(KeyError):
        coordinator.lease("one", "a", "")
    ranks[1].held.clear()


class SlowRank(Rank):
    """Loads when it is let."""

    def __init__(self):
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def load(self, number, folder, digest, version):
        self.begun.set()
        assert self.go.wait(60)
        return super().load(number, folder, digest, version)


@pytest.fixture
def slow():
    rank = SlowRank()
    made = Coordinator([rank], num_adapters=2)
    rank.go.set()
    made.lease("one", "a", "A")
    rank.go.clear(), rank.begun.clear()
    yield made, rank
    rank.go.set()
    made.close()


def test_what_is_held_is_leased_while_another_loads(slow):
    coordinator, rank = slow
    before = coordinator.lease("one", "a", "A")
    assert coordinator.request("two", "b", "B") is None
    assert rank.begun.wait(60)
    assert coordinator.request("two", "a", "A") == before  # of a table that all ranks know
    assert coordinator.request("two", "b", "B") is None
    rank.go.set()
    wait_until(lambda: coordinator.holds("b"))
    later = coordinator.request("two", "b", "B")
    assert later.version > before.version
    wait_until(lambda: coordinator.request("two", "b", "B") == later)
    assert coordinator.held() == {"a": {"one", "two"}, "b": {"two"}}


@pytest.mark.parametrize("end", ["release", "leave"])
def test_who_gives_up_while_it_loads_has_no_lease(slow, end):
    coordinator, rank = slow
    assert coordinator.request("two", "b", "B") is None
    assert rank.begun.wait(60)
    coordinator.release("two", "b") if end == "release" else coordinator.leave("two")
    rank.go.set()
    wait_until(lambda: coordinator.held().get("b") == set())


def test_who_gives_up_and_asks_again_while_it_loads_keeps_the_lease(slow):
    coordinator, rank = slow
    assert coordinator.request("two", "b", "B") is None
    assert rank.begun.wait(60)
    coordinator.release("two", "b")
    assert coordinator.request("two", "b", "B") is None
    rank.go.set()
    wait_until(lambda: coordinator.request("two", "b", "B"))
    assert coordinator.held()["b"] == {"two"}
    assert not coordinator._unwanted


def test_a_request_that_fails_says_why_once(slow):
    coordinator, rank = slow
    rank.fault = ValueError("tensor x is missing")
    assert coordinator.request("two", "b", "B") is None
    rank.go.set()

    def refused():
        try:
            return coordinator.request("two", "b", "B")
        except ValueError as error:
            return "tensor x" in str(error)

    wait_until(lambda: refused() is True)
    assert coordinator.request("two", "b", "B") is None
    wait_until(lambda: coordinator.request("two", "b", "B"))


class ReadingRank(Rank):
    """Reads when it is let; `most` is how many it has read side by side."""

    def __init__(self):
        super().__init__()
        self.lock, self.reading, self.most = threading.Lock(), 0, 0
        self.go = threading.Event()

    def fetch(self, folder, digest):
        with self.lock:
            self.reading += 1
            self.most = max(self.most, self.reading)
        assert self.go.wait(60)
        with self.lock:
            self.reading -= 1
        return super().fetch(folder, digest)


def test_files_of_several_adapters_are_read_side_by_side_and_a_bad_one_harms_no_other():
    rank = ReadingRank()
    rank.bad.add("F3")
    coordinator = Coordinator([rank], num_adapters=AT_ONCE + 2)
    names = [f"a{number}" for number in range(AT_ONCE + 2)]
    for name in names:
        assert coordinator.request("one", name, name.replace("a", "F")) is None
        assert coordinator.request("two", name, name.replace("a", "F")) is None  # read once
    wait_until(lambda: rank.reading == AT_ONCE)
    assert not coordinator.held()
    rank.go.set()
    given, errors = {}, []

    def all_told():
        for name in names:
            try:
                given[name] = coordinator.request("one", name, name.replace("a", "F"))
            except ValueError as error:
                errors.append(str(error))
        return all(given.get(name) for name in names if name != "a3") and errors

    wait_until(all_told)
    assert set(errors) == {"F3 is bad"}
    assert rank.most == AT_ONCE
    good = [name for name in names if name != "a3"]
    wait_until(lambda: set(coordinator.held()) == set(good))
    assert sorted(digest for digest, _ in rank.held.values()) == good
    coordinator.close()


def test_nothing_leaves_for_files_that_are_refused(coordinator, ranks):
    ranks[1].bad.add("C")
    for name in ("a", "b"):
        coordinator.lease("one", name, "")
    coordinator.leave("one")
    with pytest.raises(ValueError, match="C is bad"):
        coordinator.lease("one", "c", "C")
    assert set(coordinator.held()) == {"a", "b"}


def test_no_file_is_read_while_nothing_could_leave_for_it(coordinator, ranks):
    for name in ("a", "b"):
        coordinator.lease("one", name, "")
    ranks[0].bad.add("C")  # nobody finds out
    with pytest.raises(NoRoom):
        coordinator.lease("two", "c", "C")


def test_leases_from_many_threads(coordinator, ranks):
    errors = []

    def use(name):
        for turn in range(30):
            digest = f"d{turn % 3}"
            try:
                lease = coordinator.lease(name, digest, "")
            except NoRoom:
                continue
            if ranks[0].held.get(lease.number, ("",))[0] != digest:
                errors.append((name, digest, lease))
            coordinator.release(name, digest)

    threads = [threading.Thread(target=use, args=(f"i{n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
