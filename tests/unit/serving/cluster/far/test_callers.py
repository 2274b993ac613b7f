"""Callers at a socket: few prove themselves at a time, and no error but its end ends it."""

import errno
import socket
import threading

import pytest
from support.waiting import wait_until

from serving.cluster.far import callers as module
from serving.cluster.far.callers import take_callers


class Listening:
    """A listening socket whose first calls of accept raise these errors."""

    def __init__(self, *errors):
        self.errors, self.sock = list(errors), socket.create_server(("127.0.0.1", 0))
        self.address = self.sock.getsockname()

    def accept(self):
        if self.errors:
            raise self.errors.pop(0)
        return self.sock.accept()

    def close(self):
        self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def names():
    return [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")],
    ids=["descriptors", "threads"],
)
def test_a_shortage_is_said_and_later_callers_are_taken(monkeypatch, caplog, error):
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    listening, told = Listening(error), threading.Event()

    def admit(sock, address):
        sock.close()
        return told.set if address == "127.0.0.1" else None

    take_callers(listening, admit, "some callers")
    with socket.create_connection(listening.address):
        assert told.wait(60)
    assert f"No connection can be taken now (some callers): {error}" in caplog.text
    assert "some callers" in names()
    listening.close()
    wait_until(lambda: "some callers" not in names())


def test_few_prove_themselves_at_a_time_and_who_has_done_so_does_not_count(monkeypatch):
    monkeypatch.setattr(module, "_MOST_UNPROVEN", 2)
    listening, proving, proven = Listening(), [], []
    proof, end = threading.Semaphore(0), threading.Event()

    def admit(sock, address):
        proving.append(sock)
        assert proof.acquire(timeout=60)
        proven.append(sock)
        return lambda: end.wait(60) and sock.close()

    take_callers(listening, admit, "bounded callers")
    ends = [socket.create_connection(listening.address) for _ in range(4)]
    wait_until(lambda: len(proving) == 2)
    proof.release()
    wait_until(lambda: len(proving) == 3)
    assert len(proven) == 1
    proof.release(3)
    wait_until(lambda: len(proven) == 4)  # none of the first has ended
    end.set()
    for one in ends:
        assert one.recv(1) == b""
        one.close()
    listening.close()
    wait_until(lambda: "bounded callers" not in names())
