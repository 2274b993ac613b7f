"""Launches of an agent's processes, with a zygote and a backbone that only record them."""

import os
import signal
import socket
import subprocess
from types import SimpleNamespace

import pytest

from lora_jax.memory.wire import receive_header, send_header
from serving.functions import processes
from serving.functions.launcher import Launcher, LaunchSettings
from serving.functions.processes import Ends


def launcher_of(fork, send, turns=None, **settings) -> Launcher:
    """Return a launcher whose zygote is `fork` and whose backbone's `send` this is."""
    given = {"model": "m", "fields": {}, "isolation": "process", "tenant_sizes": None}
    given |= {"http": None, "slo_s": None, "memory_bytes": None} | settings
    backbone = SimpleNamespace(device="cpu", send=send)
    return Launcher(LaunchSettings(**given), SimpleNamespace(fork=fork), backbone, turns, Ends())


def test_only_digests_from_processes_with_an_engine_name_the_steps_of_the_next_one():
    """The next one unpickles the files of these names."""
    said, ends, orders = [], [], []

    def fork(facts):
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        send_header(theirs, {"ready": True, "steps": said[-1]})
        return ours, os.getpid()

    send = lambda connection, order: orders.append(order["steps"])  # noqa: E731
    launcher = launcher_of(fork, send)
    first, guards, tenants, last = (c * 64 for c in "abcd")
    for steps, kind, backbone in (
        ([first, "../budgets/planted", "/tmp/planted", 5, [[]]], {}, True),
        (5, {}, True),
        ([[]], {}, True),
        ([guards], {"guard": True}, True),
        ([tenants], {"tenant": True}, False),
        ([last], {}, True),
        ([], {}, True),
    ):
        said.append(steps)
        launcher.launch({"name": "f", "adapter": None, **kind}, backbone=backbone)[0].close()
    assert orders == [[], [first], [first], [first], [first], [last]]
    for end in ends:
        end.close()


class Turns:
    """Turns of which a process is given one end."""

    def __init__(self):
        self.opened: list[str] = []

    def open(self, name):
        self.opened.append(name)
        return socket.socket()


def launched(order, given, turns, **settings) -> dict:
    """Return the order that a process gets, from the socket or, with descriptors, from `send`."""
    asked = []

    def fork(facts):
        ours, theirs = socket.socketpair()
        asked.append(theirs)
        send_header(theirs, {"ready": True})
        return ours, os.getpid()

    send = lambda connection, order: asked.append(order)  # noqa: E731
    launcher = launcher_of(fork, send, turns, memory_bytes=7, **settings)
    launcher.launch({"name": "f", "adapter": None} | order, **given)[0].close()
    with asked[0]:
        return asked[1] if len(asked) > 1 else receive_header(asked[0])


PROCESS, READS = {"kind": "functions", "writes": True}, {"writes": False, "demands": True}


@pytest.mark.parametrize(
    ("isolation", "order", "given", "programs", "is_function"),
    [
        ("process", {}, {"programs": READS}, PROCESS | READS, True),
        ("process", {"http": None}, {"programs": {"writes": True}}, PROCESS, True),
        ("process", {"guard": True}, {}, PROCESS | {"writes": False}, False),
        ("server", {}, {}, {"kind": "engines", "writes": True}, True),
        ("server", {"tenant": True}, {"backbone": False}, {"kind": "engines", "writes": False}, 0),
        ("none", {}, {}, None, True),
    ],
    ids=["function", "maker of programs", "guard", "engine", "tenant", "none"],
)
def test_a_process_is_told_what_it_needs_and_no_more(
    isolation, order, given, programs, is_function
):
    """Guards and tenants answer no HTTP, take no turns and write no programs."""
    http, turns = {"settings": {}, "budgets_folder": "b"}, Turns()
    sizes = {"max_tenants": 3} if isolation == "server" else None
    settings = {"isolation": isolation, "http": http, "slo_s": 0.5, "tenant_sizes": sizes}
    said = launched(order, given, turns, **settings)
    assert said["programs"] == programs
    assert said["http"] == (order.get("http", http) if is_function else None)
    assert said["turns"] == ({"slo_s": 0.5} if is_function else None)
    assert turns.opened == (["f"] if is_function else [])
    makes = isolation == "process" and programs["writes"]
    bounds = {"memory_bytes": None if makes else 7, "gpus": False}
    assert said["jail"] == (None if isolation == "none" else bounds)
    assert said.get("tenants") == (sizes if given.get("backbone", True) else None)


def test_a_process_that_ends_before_it_is_ready_is_told_with_its_bound():
    def fork(facts):
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours, os.getpid()

    for limit, words in ((64 << 20, r"It may hold 64 MiB .*: if that is too little"), (None, "$")):
        launcher = launcher_of(fork, lambda *_: None, memory_bytes=limit)
        with pytest.raises(ConnectionError, match=rf"ended before it was ready: .*\. ?{words}"):
            launcher.launch({"name": "f", "adapter": None}, programs={"writes": False})


def test_a_start_that_is_stopped_is_killed_and_named(monkeypatch, caplog):
    """Others start meanwhile: nothing is held while the agent waits for it."""
    monkeypatch.setattr(processes, "_LOOK_S", 0.01)
    stuck = subprocess.Popen(["sleep", "600"])
    stuck.send_signal(signal.SIGSTOP)
    ends = []

    def fork(facts):
        ours, theirs = socket.socketpair()
        ends.append(theirs)
        return ours, stuck.pid

    launcher = launcher_of(fork, lambda connection, order: None)
    with pytest.raises(ConnectionError, match=rf"start of 'f' .*{stuck.pid} is stopped \(SIGSTOP"):
        launcher.launch({"name": "f", "adapter": None})
    assert stuck.wait(60) == -signal.SIGKILL
    assert "The start of 'f' is given up" in caplog.text
    (theirs,) = ends
    with theirs:
        assert theirs.recv(1) == b""


def test_a_start_that_reads_nothing_is_killed_and_named():
    process = subprocess.Popen(["sleep", "600"])
    ours, theirs = socket.socketpair()

    def send(connection, order):
        raise BlockingIOError

    launcher = launcher_of(lambda facts: (ours, process.pid), send)
    with theirs, pytest.raises(ConnectionError, match=rf"{process.pid} has read nothing for 60 s"):
        launcher.launch({"name": "f", "adapter": None})
    assert process.wait(60) == -signal.SIGKILL
