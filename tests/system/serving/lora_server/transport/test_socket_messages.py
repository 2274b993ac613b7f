"""Meeting at a socket: answers, refusals, full houses, dead predecessors, and an end for all."""

import os
import socket
import stat
import threading
import time

import pytest
from support.waiting import wait_until

from serving.lora_server.transport import socket_messages
from serving.lora_server.transport.base import TransportError
from serving.lora_server.transport.socket_messages import (
    Guest,
    Listener,
    Watch,
    call,
    owned,
    receive,
    send,
    unix_listener,
    wait_for_end,
    wait_for_listener,
)

LONG = 60


def guest(answer, gone=lambda: None):
    return Guest(answer, [], wait_for_end, gone)


@pytest.fixture
def house(tmp_path):
    """A listener that hands out a pipe's end, and what it has seen."""
    seen, gone = [], []

    def welcome(said):
        seen.append(said)
        if said.get("unwanted"):
            raise TransportError("not you")
        reading, writing = os.pipe()
        os.close(writing)
        gone_now = lambda: gone.append(len(seen))  # noqa: E731
        return Guest({"number": len(seen)}, [reading], wait_for_end, gone_now)

    listener = Listener(unix_listener(tmp_path / "house.sock"), welcome)
    yield listener, seen, gone
    listener.close()
    listener.close()


def test_an_answer_brings_its_descriptors(house):
    listener, seen, gone = house
    files = len(os.listdir("/proc/self/fd"))
    connection, answer, fds = call(listener.address, {"name": "x" * 5000}, 1)
    assert (seen, answer, len(fds)) == ([{"name": "x" * 5000}], {"number": 1}, 1)
    assert os.read(fds[0], 1) == b""
    os.close(fds[0])
    assert gone == []
    connection.close()
    wait_until(lambda: gone == [1])
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)


def test_only_this_user_may_connect(house):
    assert stat.S_IMODE(os.stat(house[0].address).st_mode) == 0o600


def test_a_refusal_is_said_in_the_listeners_words(house):
    with pytest.raises(TransportError, match="not you"):
        call(house[0].address, {"unwanted": True}, 1)
    with pytest.raises(TransportError, match="sent 1 descriptors, expected 2"):
        call(house[0].address, {}, 2)


def test_a_full_house_lets_nobody_in(house, monkeypatch):
    monkeypatch.setattr(socket_messages, "MOST_CLIENTS", 1)
    connection, _, fds = call(house[0].address, {}, 1)
    os.close(fds[0])
    with pytest.raises(ConnectionError):
        call(house[0].address, {}, 1)
    connection.close()


def test_the_path_of_a_dead_process_is_taken_over(tmp_path):
    path = tmp_path / "left.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    listener = Listener(unix_listener(path), lambda said: guest({"alive": 1}))
    connection, answer, _ = call(path, {}, 0)
    assert answer == {"alive": 1}
    connection.close()
    with pytest.raises(ValueError, match=r"another process listens at .*left\.sock"):
        unix_listener(path)
    listener.close()
    assert not path.exists()


def test_a_silent_listener_is_not_waited_for_long(tmp_path, monkeypatch):
    monkeypatch.setattr(socket_messages, "_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind(str(tmp_path / "silent.sock"))
        silent.listen()
        with pytest.raises(TransportError, match="did not answer"):
            call(tmp_path / "silent.sock", {}, 0)


def test_bytes_that_drip_in_hold_a_place_no_longer_than_a_message_may_take(house, monkeypatch):
    monkeypatch.setattr(socket_messages, "_SECONDS", 0.3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow:
        slow.connect(house[0].address)
        slow.sendall((60_000).to_bytes(4, "little"))
        with pytest.raises(OSError, match=r"Broken pipe|reset"):  # noqa: PT012
            for _ in range(200):
                time.sleep(0.05)
                slow.sendall(b" ")
    assert house[1] == []


def test_a_message_that_takes_several_calls_has_one_time_limit():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(LONG)
        send(theirs, {"a": 1})
        assert receive(ours) == ({"a": 1}, [])
        assert ours.gettimeout() == LONG
        ours.settimeout(0.05)
        theirs.sendall(b"\x08\0\0\0{")
        with pytest.raises(TimeoutError):
            receive(ours)
        assert ours.gettimeout() == 0.05


def test_a_message_of_too_many_levels_is_no_message():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall((60_000).to_bytes(4, "little") + b"[" * 60_000)
        with pytest.raises(ValueError, match="too many levels"):
            receive(ours)


def test_nobody_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        call(tmp_path / "nobody", {}, 0)


def test_a_watch_tells_of_the_end_and_ends_itself():
    for close_other_side in (True, False):
        ours, theirs = socket.socketpair()
        told = threading.Event()
        watch = Watch(ours, wait_for_end, told.set)
        assert not told.is_set()
        if close_other_side:
            theirs.close()
            assert told.wait(LONG)
        watch.close()
        theirs.close()
        assert told.is_set()
        assert ours.fileno() == -1


def test_closing_sends_everybody_home(tmp_path):
    gone, before = [], {*threading.enumerate()}
    listening = unix_listener(tmp_path / "house.sock")
    listener = Listener(listening, lambda said: guest({}, lambda: gone.append(1)))
    connections = [call(listener.address, {}, 0)[0] for _ in range(3)]
    threads = [t for t in {*threading.enumerate()} - before if t.name.startswith("transport-")]
    assert len(threads) == 4
    listener.close()
    assert gone == [1, 1, 1]
    assert not any(thread.is_alive() for thread in threads)
    for connection in connections:
        assert connection.recv(1) == b""
        connection.close()


def test_who_is_not_admitted_is_not_heard(tmp_path):
    heard = []

    def admit(connection):
        if connection.recv(1) != b"a":
            raise TransportError("say a")

    def welcome(said):
        heard.append(said)
        return guest({"heard": len(heard)})

    listener = Listener(unix_listener(tmp_path / "house.sock"), welcome, admit)
    for size in (0, 60_000):  # so much that the refusal comes before it is read
        with pytest.raises(TransportError, match="say a"):
            call(listener.address, {"x": "x" * size}, 0)
    assert heard == []
    connection, answer, _ = call(listener.address, {}, 0, lambda c: c.sendall(b"a"))
    assert (heard, answer) == ([{}], {"heard": 1})
    connection.close()
    listener.close()


def test_a_listener_may_be_waited_for(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        wait_for_listener(tmp_path / "late.sock", 0.05)
    waiting = threading.Thread(target=wait_for_listener, args=(tmp_path / "late.sock", LONG))
    waiting.start()
    listener = Listener(unix_listener(tmp_path / "late.sock"), lambda said: guest({}))
    waiting.join(LONG)
    assert not waiting.is_alive()
    listener.close()


def test_over_tcp_a_message_is_the_same():
    listener = Listener(socket.create_server(("127.0.0.1", 0)), lambda said: guest(said))
    connection, answer, fds = call(listener.address, {"said": "é" * 4000}, 0)
    assert (answer, fds) == ({"said": "é" * 4000}, [])
    connection.close()
    listener.close()


def test_both_ends_of_tcp_find_out_that_the_other_host_has_lost_power():
    """Else a relay and its seat wait for ever: no packet says that a host is gone."""
    theirs = []

    def stay(connection):
        theirs.append(options_of(connection))
        wait_for_end(connection)

    listener = Listener(
        socket.create_server(("127.0.0.1", 0)), lambda said: Guest({}, [], stay, lambda: None)
    )
    connection, _, _ = call(listener.address, {}, 0)
    wait_until(lambda: theirs)
    wanted = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
    assert options_of(connection) == theirs[0] == {"SO_KEEPALIVE": 1, "TCP_NODELAY": 1, **wanted}
    connection.close()
    listener.close()


def options_of(connection):
    names = ("TCP_NODELAY", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    of_tcp = {n: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, n)) for n in names}
    return of_tcp | {"SO_KEEPALIVE": connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}


def test_a_socket_that_is_owned_is_closed_when_its_owner_fails():
    one, other = socket.socketpair()
    with owned(one):
        assert one.fileno() >= 0
    assert one.fileno() >= 0
    with pytest.raises(ValueError, match="no"), owned(one):
        raise ValueError("no")
    assert one.fileno() == -1
    other.close()
