"""Members meet only if they know the secret and are alike; every refusal says what to change."""

import json
import os
import socket
import struct
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.high_descriptor import high_descriptor
from support.processes.server_process import free_port
from support.tcp_pair import tcp_pair

from serving.runtime import gang_stream as module
from serving.runtime.gang_stream import (
    Connection,
    GangPlace,
    GangRefused,
    gather_followers,
    join_leader,
    reach_of,
)

SECRET, OTHER = b"s" * 32, b"t" * 32
ABOUT = {"--max-loras": "2", "version of jax": "1"}


@pytest.fixture
def port():
    return free_port()


def place(port, rank, secret=SECRET, size=2, wait_s=60.0):
    return GangPlace(rank, size, ("127.0.0.1", port), secret, wait_s)


def meet(leader, *followers):
    """What each side gets: a result, or the exception it raised."""
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(gather_followers, *leader, "here:1")]
        jobs += [pool.submit(join_leader, *follower) for follower in followers]
        return [job.exception() or job.result() for job in jobs]


def test_members_meet_and_learn_where_the_coordinator_is(port):
    found, *joined = meet(
        (place(port, 0, size=3), ABOUT), *((place(port, n, size=3), ABOUT) for n in (1, 2))
    )
    assert sorted(found) == [1, 2]
    assert [where for _, where in joined] == ["here:1"] * 2
    found[1].send({"a": 1})
    found[1].beat(serving=True)
    assert joined[0][0].receive(60.0) == (False, {"a": 1})
    assert joined[0][0].receive(60.0) == (True, True)
    with pytest.raises(TimeoutError, match=r"no word for 0\.01 s"):
        joined[1][0].receive(0.01)
    found[1].close()
    with pytest.raises(ConnectionError, match="closed"):
        joined[0][0].receive(60.0)
    for connection in (found[2], *(connection for connection, _ in joined)):
        connection.close()


def test_a_wrong_secret_is_sent_away_and_the_right_one_still_comes(port, caplog):
    first = threading.Event()

    def follow():
        with pytest.raises(GangRefused, match="the secret is not rank 0's: give all nodes"):
            join_leader(place(port, 1, OTHER), ABOUT)
        first.set()
        return join_leader(place(port, 1), ABOUT)

    with ThreadPoolExecutor() as pool:
        follower = pool.submit(follow)
        found = gather_followers(place(port, 0), ABOUT, "here:1")
        assert sorted(found) == [1]
        for connection in (found[1], follower.result()[0]):
            connection.close()
    assert first.is_set()
    assert "is no member of this instance: a wrong secret" in caplog.text


def test_a_leader_without_the_secret_is_not_followed(port):
    """It can send what it likes: without its proof no command is taken."""

    def pretend():
        with socket.create_server(("127.0.0.1", port)) as listener:
            connection = Connection(listener.accept()[0])
            connection.raw(b"n" * 32)
            connection.receive_text()
            connection.send_text({"coordinator": "there:1"})
            connection.raw(b"p" * 32)
            connection.close()

    with ThreadPoolExecutor() as pool:
        other = pool.submit(pretend)
        with pytest.raises(GangRefused, match="Rank 0 does not know the secret"):
            join_leader(place(port, 1), ABOUT)
        other.result()


@pytest.mark.parametrize(
    ("rank", "about", "message"),
    [
        (1, ABOUT | {"--max-loras": "3"}, "--max-loras is '3' on node 1 and '2' on rank 0"),
        (1, {"--max-loras": "2"}, "version of jax is None on node 1 and '1' on rank 0"),
        *((rank, ABOUT, rf"--node-rank {rank} is taken, or not in \[1, 1\]") for rank in (0, 2)),
    ],
)
def test_members_that_differ_are_refused_on_both_sides(port, rank, about, message):
    for error in meet((place(port, 0), ABOUT), (place(port, rank), about)):
        assert isinstance(error, GangRefused)
        with pytest.raises(GangRefused, match=message):
            raise error


def test_a_second_member_of_a_rank_is_refused():
    ours, theirs = map(Connection, tcp_pair())
    leader, follower = place(1, 0, size=3), place(1, 1, size=3)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(module._introduce, theirs, follower, ABOUT)
        with pytest.raises(GangRefused, match=r"Node 1 does not fit: --node-rank 1 is taken"):
            module.welcome(ours, leader, ABOUT, "here:1", {1})
        with pytest.raises(GangRefused, match="--node-rank 1 is taken"):
            joining.result()
    for connection in (ours, theirs):
        connection.close()


def test_a_proof_is_of_the_words_that_come_with_it():
    """What is changed on the way is not of a member."""
    ours, theirs = map(Connection, tcp_pair())

    def introduce():
        nonce = theirs.receive_proof(32)
        text = json.dumps({"rank": 1, "nonce": "00", "about": ABOUT}).encode()
        other = text.replace(b'"rank": 1', b'"rank": 2')
        theirs.raw(struct.pack("<Q", len(other)) + other)
        theirs.raw(module._proof(place(1, 1), nonce, text))

    with ThreadPoolExecutor() as pool:
        pool.submit(introduce)
        with pytest.raises(ConnectionError, match="a wrong secret"):
            module.welcome(ours, place(1, 0, size=3), ABOUT, "here:1", {})
    for connection in (ours, theirs):
        connection.close()


def test_a_stranger_cannot_announce_more_than_a_greeting():
    ours, theirs = map(Connection, tcp_pair())
    theirs.raw(struct.pack("<Q", 1 << 40))
    with pytest.raises(ConnectionError, match="a greeting of 1099511627776 bytes"):
        ours.receive_text()
    for connection in (ours, theirs):
        connection.close()


def test_a_hung_member_is_found_within_five_seconds():
    assert 3 * module.BEAT_S < module.SILENT_S < 5


def test_a_taken_port_and_missing_members_are_named(port):
    taken = pytest.raises(GangRefused, match=rf"{port}: Address already in use; give all")
    with socket.create_server(("127.0.0.1", port)), taken:
        gather_followers(place(port, 0), ABOUT, "here:1")
    with pytest.raises(GangRefused, match=r"Nodes \[1\] of 2 have not come within 0\.1 s"):
        gather_followers(place(port, 0, wait_s=0.1), ABOUT, "here:1")
    with pytest.raises(GangRefused, match=rf"Rank 0 does not answer at 127\.0\.0\.1:{port}"):
        join_leader(place(port, 1, wait_s=0.1), ABOUT)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("203.0.113.7", "must be an address of the host of --node"),
        ("no.such.host", "node 0"),
    ],
)
def test_an_address_of_another_host_is_refused(port, address, words):
    with pytest.raises(GangRefused, match=f"--master-addr {address} .*{words}"):
        module.listen((address, port))


def test_a_node_that_waits_for_rank_0_says_so_once(port, monkeypatch, caplog):
    monkeypatch.setattr(module, "_QUIET_S", 0.0)
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    with pytest.raises(GangRefused):
        join_leader(place(port, 1, wait_s=0.5), ABOUT)
    said = f"Rank 0 does not answer at 127.0.0.1:{port} yet"
    assert caplog.text.count(said) == 1
    assert "node 1 waits up to 0.5 s for it. 127.0.0.1 is this host's own loopback" in caplog.text


def test_a_name_that_leads_each_host_to_itself_is_told(monkeypatch):
    """As a host's own name does where /etc/hosts says 127.0.1.1."""
    names = {"head": "127.0.1.1", "head.network": "10.0.0.1"}
    monkeypatch.setattr(module.socket, "gethostbyname", names.__getitem__)
    assert reach_of("head").startswith(" head is this host's own loopback: other hosts do not find")
    assert reach_of("head.network") == ""


def test_a_short_secret_is_refused(port):
    with pytest.raises(GangRefused, match="has 3 bytes; at least 16"):
        place(port, 1, b"abc")
    assert str(SECRET) not in repr(place(port, 1))


class Dripping:
    """A socket from which one byte comes each second of a clock."""

    def __init__(self, sent):
        self.sent, self.now = list(sent), 0.0
        self.readable, self._write = os.pipe()
        os.write(self._write, b"x")

    def setsockopt(self, *given):
        """Nothing is sent."""

    def fileno(self):
        return self.readable

    def recv(self, size):
        self.now += 1.0
        return bytes([self.sent.pop(0)])

    def close(self):
        os.close(self.readable)
        os.close(self._write)


@pytest.mark.parametrize("read", ["receive_text", "receive_proof"])
def test_a_stranger_who_sends_little_by_little_holds_nobody_for_long(monkeypatch, read):
    dripping = Dripping(b"\x20" + bytes(7) + bytes(32))
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: dripping.now))
    sized = (32,) if read == "receive_proof" else ()
    with pytest.raises(TimeoutError, match="no word for 5 s"):
        getattr(Connection(dripping), read)(*sized)
    assert dripping.now == 5.0
    dripping.close()


def test_a_connection_of_a_process_with_many_others_is_heard():
    """The descriptor of a node that comes back is above those of the front's clients."""
    ours, theirs = tcp_pair()
    with high_descriptor(theirs.detach()) as high:
        one, other = Connection(ours), Connection(socket.socket(fileno=high))
        one.send("there?")
        assert other.receive(60.0) == (False, "there?")
        one.close()
        other.close()
