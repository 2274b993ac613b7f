"""A process of a function that ends: whoever waits is told."""

import socket

from lora_jax.memory.wire import receive_fds, receive_header, send_header
from serving.functions.running import Running


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
