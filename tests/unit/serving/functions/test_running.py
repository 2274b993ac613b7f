"""A process of a function that ends: whoever waits is told."""

import queue
import socket
import threading
import time

import pytest
from support.waiting import wait_until

from lora_jax.memory.wire import receive_fds, receive_header, send_header
from serving.functions import processes
from serving.functions.running import LACKED, Running


def pair() -> tuple[Running, socket.socket]:
    """Return a process and its side of the connection."""
    ours, theirs = socket.socketpair()
    return Running(ours, 1, {}), theirs


def test_calls_of_an_ended_process_are_answered():
    running, theirs = pair()
    waiting = running.send({"call": "x"})
    theirs.close()
    running.read()
    assert waiting.get(timeout=60) == {"error": "FunctionDied"}
    assert running.send({"call": "x"}) is None
    assert running.connect() is None
    assert not running.end_if_idle()
    running.close()


NONSENSE = [{}, {"id": []}, {"id": 0, "tenant": "a"}]
NONSENSE += [{"lost": "a"}, {"private_bytes": "much"}, {"private_bytes": float("inf")}]


@pytest.mark.parametrize("message", NONSENSE, ids=str)
def test_a_process_that_sends_nonsense_is_given_up_and_its_calls_end(message):
    running, theirs = pair()
    waiting = running.send({"call": "x"})
    with theirs:
        send_header(theirs, message)
        running.read()
        assert waiting.get(timeout=60) == {"error": "FunctionDied"}
        assert theirs.recv(4096)
        assert theirs.recv(1) == b""  # so that it leaves
    assert running.ended


def test_a_process_that_ran_out_of_its_memory_says_why_its_calls_end():
    running, theirs = pair()
    told = []
    running.on_lack = lambda: told.append("lacks")
    waiting = running.send({"call": "x"})
    with theirs:
        send_header(theirs, {"lacks_memory": True})
    running.read()
    assert waiting.get(timeout=60) == {"error": "FunctionDied", "why": LACKED}
    assert told == ["lacks"]


def test_a_process_that_is_given_up_takes_no_call_before_its_end_is_seen():
    running, theirs = pair()
    waiting = running.send({"call": "x"})
    running.give_up()
    assert running.ended
    assert running.send({"call": "y"}) is None
    running.read()
    assert waiting.get(timeout=60) == {"error": "FunctionDied"}
    with theirs:
        assert theirs.recv(4096)
        assert theirs.recv(1) == b""


def test_a_process_says_by_itself_of_adapters_that_are_lost_or_let_go():
    running, theirs = pair()
    told = []
    running.on_lost = lambda name, epoch: told.append((name, epoch))
    running.on_freed = told.append
    waiting = running.send({"call": "x"})
    with theirs:
        send_header(theirs, {"lost": "law", "epoch": 3})
        send_header(theirs, {"freed": 5})
        send_header(theirs, {"id": 0, "value": 1})
    running.read()
    assert waiting.get(timeout=60) == {"id": 0, "value": 1}
    assert told == [("law", 3), 5]


def test_a_process_that_has_grown_says_so_and_its_calls_go_on():
    running, theirs = pair()
    told = []
    running.on_grown = told.append
    waiting = running.send({"call": "x"})
    with theirs:
        send_header(theirs, {"private_bytes": 7})
        send_header(theirs, {"id": 0, "value": 1})
    running.read()
    assert waiting.get(timeout=60) == {"id": 0, "value": 1}
    assert told == [7]


def test_a_connection_is_under_way_until_the_process_says_that_it_is_closed():
    running, theirs = pair()
    with running.connect() as http, theirs:
        call = receive_header(theirs)
        (fd,) = receive_fds(theirs, 1)
        with socket.socket(fileno=fd) as given:
            given.sendall(b"answer")
        assert http.recv(10) == b"answer"
        assert not running.end_if_idle()
        send_header(theirs, {"id": call["id"], "value": None})
        theirs.shutdown(socket.SHUT_WR)
        running.read()
    assert running.ended


def test_a_process_that_does_not_read_takes_no_more_connections():
    """Whoever asks is told at once: the front's loop never waits for one function."""
    running, theirs = pair()
    with theirs:
        given = []
        while (one := running.connect()) is not None:
            given.append(one)
            assert len(given) < 10_000
        assert given
        for one in given:
            one.close()
        running.close()
        running.read()


def test_a_process_that_ends_while_it_is_handed_a_connection_is_left():
    running, theirs = pair()
    theirs.shutdown(socket.SHUT_RD)  # what is sent to it is an error from now on
    assert running.connect() is None
    assert running.ended
    theirs.close()
    running.read()


def test_only_a_process_without_calls_is_ended():
    running, theirs = pair()
    with theirs:
        assert running.is_idle
        waiting = running.send({"call": "x"})
        assert not running.is_idle
        assert not running.end_if_idle()
        send_header(theirs, {"id": receive_header(theirs)["id"], "value": 3})
        reading = threading.Thread(target=running.read)
        reading.start()
        assert waiting.get(timeout=60)["value"] == 3
        while not running.is_idle:
            time.sleep(0.01)
        assert running.end_if_idle()
        assert not running.ended_by_others
        reading.join(60)


def test_a_process_that_reads_nothing_holds_up_its_caller_alone(monkeypatch, caplog):
    """What plans room for other functions asks whether it is idle, and ends it."""
    running, theirs = pair()
    monkeypatch.setattr(processes, "SEND_S", 1.0)
    processes.bound_sends(running._connection)
    ended = []
    running.on_end = lambda: ended.append(True)
    answers = queue.SimpleQueue()
    sending = threading.Thread(target=lambda: answers.put(running.send({"call": "x" * (1 << 22)})))
    sending.start()
    wait_until(lambda: not running.is_idle)
    assert not running.is_idle
    assert not running.end_if_idle()
    assert running.connect() is None
    assert not running.has_calls("law")
    reading = threading.Thread(target=running.read)
    reading.start()
    with theirs:
        waiting = answers.get(timeout=60)  # sends of this process are bounded
        reading.join(60)
    assert waiting.get(timeout=60) == {"error": "FunctionDied"}
    assert "does not read its calls" in caplog.text
    assert ended == [True]
    sending.join(60)
