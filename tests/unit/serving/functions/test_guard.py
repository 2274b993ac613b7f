"""The guard as its agent has it: a backup when its process ends, and a report of what changed."""

import queue
import socket
import threading

import pytest

from lora_jax.memory.wire import receive_header, send_header
from serving.functions.guard import Guard


class Processes:
    """Guards' processes as threads; `found` is what the next checks find."""

    def __init__(self):
        self.found: list[str] = []
        self.ends: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self.all: list[socket.socket] = []
        self.refusals = 0

    def launch(self, order):
        assert order["guard"]
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError("no process")
        ours, theirs = socket.socketpair()
        self.all.append(theirs)
        threading.Thread(target=self.answer, args=(theirs,), daemon=True).start()
        self.ends.put(theirs)
        return ours, len(self.all), {"changed": self.found}

    def answer(self, connection):
        try:
            while True:
                call = receive_header(connection)
                send_header(connection, {"id": call["id"], "value": self.found})
        except OSError:
            return


@pytest.fixture
def processes():
    made = Processes()
    yield made
    for end in made.all:
        end.close()


def test_it_checks_when_asked_and_a_backup_takes_its_place(processes):
    guard = Guard(processes.launch, 1e5, lambda names: None)
    assert guard.wait_checked(1, 60)
    guard.look()
    assert guard.wait_checked(2, 60)
    assert guard.pid == 1
    processes.ends.get(timeout=60).shutdown(socket.SHUT_RDWR)
    guard.look()
    assert guard.wait_checked(3, 60)
    assert (guard.pid, guard.starts) == (2, 2)
    guard.close()
    assert guard.pid is None


def test_a_start_that_fails_is_tried_again(processes, monkeypatch):
    monkeypatch.setattr("serving.functions.guard._AGAIN_S", 0.01)
    processes.refusals = 2
    guard = Guard(processes.launch, 1e5, lambda names: None)
    assert guard.wait_checked(1, 60)
    guard.close()


def test_changed_bytes_are_reported_and_what_comes_after_is_checked_anew(processes):
    reported = queue.SimpleQueue()

    def changed(names):
        processes.found = []
        reported.put(names)

    guard = Guard(processes.launch, 0.01, changed)
    assert guard.wait_checked(2, 60)
    processes.found = ["embedding"]
    assert reported.get(timeout=60) == ["embedding"]
    before = guard.starts
    assert guard.wait_checked(guard.checks + before + 2, 60)
    guard.close()


def test_a_backbone_that_cannot_be_loaded_anew_is_tried_again(processes, monkeypatch, caplog):
    """Until then its functions stay off: `changed` ends them before it loads."""
    monkeypatch.setattr("serving.functions.guard._AGAIN_S", 0.01)
    tried = queue.SimpleQueue()
    text = "the files are not those that were loaded before"
    errors = [ValueError(text), RuntimeError(text)]

    def changed(names):
        tried.put(names)
        if errors:
            raise errors.pop()
        processes.found = []

    processes.found = ["embedding"]
    guard = Guard(processes.launch, 1e5, changed)
    assert guard.wait_checked(1, 60)
    guard.close()
    assert tried.qsize() == 3
    assert caplog.text.count("cannot be loaded again, functions stay off: the files are not") == 2


def test_closing_does_not_wait_for_a_load_without_end(processes, monkeypatch, caplog):
    monkeypatch.setattr("serving.functions.guard._CLOSE_S", 0.01)
    loading, end = threading.Event(), threading.Event()

    def changed(names):
        loading.set()
        end.wait(60)

    processes.found = ["embedding"]
    guard = Guard(processes.launch, 1e5, changed)
    assert loading.wait(60)
    guard.close()
    assert "has not ended within 0.01 s" in caplog.text
    end.set()
