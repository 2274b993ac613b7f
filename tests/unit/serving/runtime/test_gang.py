"""Commands arrive in order, and every end or silence of a member is noticed."""

import queue
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from support.processes.server_process import free_port

from serving.runtime import gang as module
from serving.runtime.gang import Gang
from serving.runtime.gang_stream import GangPlace


class Lost:
    """What a member is told of lost ones."""

    def __init__(self):
        self.event, self.why = threading.Event(), []

    def __call__(self, why):
        self.why.append(why)
        self.event.set()

    def wait(self):
        assert self.event.wait(60)
        return self.why[0]


@pytest.fixture
def pair():
    """Two members of one process, and what each is told; jax is not started."""
    address = "127.0.0.1", free_port()
    lost = Lost(), Lost()
    with ThreadPoolExecutor() as pool:
        places = [GangPlace(rank, 2, address, b"s" * 32, 60.0) for rank in (0, 1)]
        jobs = [pool.submit(Gang, p, {"a": 1}, lost[p.rank], 1.5) for p in places]
        gangs = [job.result() for job in jobs]
    yield *gangs, lost
    for gang in gangs:
        gang._closing.set()
        for connection in gang._peers.values():
            connection.close()


def test_values_are_shared_and_commands_come_in_order_until_the_end(pair, monkeypatch):
    monkeypatch.setattr(module, "_END_S", 60)  # a follower that is late is no lost one
    leader, follower, lost = pair
    assert leader.is_leader
    assert not follower.is_leader
    assert leader.shared({"size": 3}) == follower.shared({"size": 4}) == {"size": 3}
    with ThreadPoolExecutor() as pool:
        met = [pool.submit(gang.meet) for gang in (follower, leader)]
        assert [job.result() for job in met] == [None, None]
    for number in range(100):
        leader.tell(number)
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(leader.close)  # it waits for the follower
        assert list(follower.commands()) == list(range(100))
        follower.close()
        ended.result()
    leader.close()
    assert not lost[0].why
    assert not lost[1].why
    assert (leader._is_far, follower._is_far) == (False, False)


@pytest.mark.parametrize("dead", [0, 1])
def test_a_member_that_has_gone_is_noticed_at_once(pair, dead):
    *gangs, lost = pair
    other = gangs[dead]._peers[1 - dead]
    other._sock.shutdown(socket.SHUT_RDWR)  # as the end of its process does
    assert f"node {dead}" in lost[1 - dead].wait()


@pytest.mark.long
@pytest.mark.parametrize("hung", [0, 1])
def test_a_silent_member_is_noticed(pair, hung):
    *gangs, lost = pair
    for gang in reversed(gangs):  # rank 0 waits for the other
        gang.serve()
    gangs[hung]._closing.set()  # it beats no more, and its connection stays
    assert lost[1 - hung].wait() == f"node {hung}: no word for 1.5 s"


@pytest.fixture
def rare_beats(monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 60.0)


def test_a_member_that_hangs_before_its_next_beat_is_noticed_as_soon(rare_beats, pair):
    """Rank 0 is ready when it knows that the other is, and not a beat before."""
    leader, follower, lost = pair
    leader._silent_s, follower._silent_s = 0.2, 60.0
    with ThreadPoolExecutor() as pool:
        serving = pool.submit(leader.serve)
        with pytest.raises(TimeoutError):
            serving.result(0.05)
        follower.serve()
        serving.result(60)
    assert lost[0].wait() == "node 1: no word for 0.2 s"
    assert not lost[1].why  # it has longer


def fake_jax():
    """Return what `start_jax` calls, which notes its settings."""
    jax = SimpleNamespace(settings={}, distributed=SimpleNamespace())
    jax.config = SimpleNamespace(update=jax.settings.__setitem__)
    return jax


@pytest.mark.parametrize("rank", [0, 1])
def test_jax_s_coordinator_listens_at_its_own_address_and_a_lost_member_aborts_nobody(
    monkeypatch, rank
):
    jax = fake_jax()
    jax.distributed.initialize = lambda *given, **more: jax.settings.update(more)
    monkeypatch.setattr(module, "jax", jax)
    made = member(rank, Lost())
    made._coordinator, made._is_far = "127.0.0.1:7", False
    made.start_jax()
    assert jax.settings["coordinator_bind_address"] == (None if rank else "127.0.0.1:7")
    assert jax.settings["jax_enable_recoverability"]


def test_a_host_whose_name_is_its_own_loopback_is_warned(monkeypatch, caplog):
    """CPU devices of other hosts would be told that address."""
    said, jax = [], fake_jax()
    jax.distributed.initialize = lambda *given, **more: said.append(given)
    monkeypatch.setattr(module, "jax", jax)
    monkeypatch.setattr(module.socket, "gethostname", lambda: "127.0.1.1")
    for address, warned in (("127.0.0.1", False), ("203.0.113.7", True)):
        member = object.__new__(Gang)
        member.rank, member.size, member._coordinator = 1, 2, f"{address}:7"
        member._is_far = not module.is_loopback(address)
        member.start_jax()
        assert ("127.0.1.1, is an address of this host alone" in caplog.text) == warned
    assert said == [("127.0.0.1:7", 2, 1), ("203.0.113.7:7", 2, 1)]
    assert not module.is_loopback("no.such.host.invalid")


class Deaf:
    """A connection on which nothing can be sent."""

    def send(self, command):
        raise BrokenPipeError("nobody is there")

    def beat(self, *, serving):
        raise BrokenPipeError("no beat")

    def close(self):
        """Nothing is held."""


def member(rank, lost):
    """Return a member whose only peer cannot be reached, without its threads."""
    made = object.__new__(Gang)
    made.rank, made.size, made._lost, made._peers = rank, 2, lost, {1 - rank: Deaf()}
    made._sending, made._closing = threading.Lock(), threading.Event()
    made._serving = made._closed = False
    made._starting, made._all_serve = {1 - rank}, threading.Event()
    made._listeners, made._commands, made._silent_s = [], queue.SimpleQueue(), 60.0
    return made


def test_rank_0_waits_for_all_others_and_for_no_one_that_is_lost():
    leader = member(0, Lost())
    leader._starting = {1, 2}
    leader._note_start(2)
    assert not leader._all_serve.is_set()
    leader._note_start(1)
    assert leader._all_serve.is_set()
    other = member(0, Lost())
    other._gone("node 1: no word")
    assert other._all_serve.is_set()
    assert other._lost.why == ["node 1: no word"]


def test_a_member_that_was_told_of_the_end_misses_nobody():
    """Rank 0's connection ends right after its last command."""
    said = [(True, True), (False, module._STOP)]

    def receive(silent_s):
        if not said:
            raise ConnectionError("closed")
        return said.pop(0)

    follower = member(1, Lost())
    follower._listen(0, SimpleNamespace(receive=receive))
    assert not follower._lost.why
    assert list(follower.commands()) == []


def test_a_beat_waits_only_so_long_for_a_command_on_its_way(monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.001)
    follower = member(1, Lost())
    with follower._sending:  # as while a long command is sent
        follower._beat_once()
    assert not follower._lost.why


def test_a_command_or_a_beat_that_cannot_be_sent_is_the_end_of_a_member(monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.001)
    leader = member(0, Lost())
    leader.tell("step")
    assert leader._lost.why == ["a command could not be sent: nobody is there"]
    follower = member(1, Lost())
    follower._lost.event.clear()
    thread = threading.Thread(target=follower._beat)
    thread.start()
    assert follower._lost.wait() == "node 0: no beat"
    follower._closing.set()
    thread.join(60)


def test_a_coordinator_that_fails_at_the_end_is_logged(monkeypatch, caplog):
    def shutdown():
        raise RuntimeError("a task is gone")

    monkeypatch.setattr(module.jax.distributed, "shutdown", shutdown)
    leader = member(0, Lost())
    leader.close()
    assert "jax's coordinator failed while it ended: a task is gone" in caplog.text
    assert not leader._lost.why  # the end has begun: nobody is missed


def test_a_process_that_has_lost_a_member_says_why_and_ends_at_once(monkeypatch, caplog):
    statuses = []
    monkeypatch.setattr(module.os, "_exit", statuses.append)
    module.end_process("node 1: no word for 1.5 s")
    assert statuses == [module.EXIT_LOST]
    assert "The instance has lost a member (node 1: no word for 1.5 s)" in caplog.text
