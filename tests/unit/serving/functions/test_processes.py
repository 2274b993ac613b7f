"""Processes of an agent: reasons of those that do not get ready; forks are in test_agent.py."""

import errno
import itertools
import os
import signal
import socket
import subprocess
import threading
from types import SimpleNamespace

import pytest
from support.waiting import wait_until

from lora_jax.memory.wire import receive_fds, receive_header, send_header
from serving.functions import processes
from serving.functions.processes import Ends, Stuck, Zygote, await_message, expect, is_stuck


def test_a_process_that_is_not_ready_says_why_or_has_ended():
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            send_header(theirs, {"ready": True, "start_s": 1})
            send_header(theirs, {"error": "no such adapter"})
            send_header(theirs, {"error": "no device memory", "retryable": True})
        assert expect(ours, "ready", 0)["start_s"] == 1
        with pytest.raises(ValueError, match="no such adapter"):
            expect(ours, "ready", 0)
        with pytest.raises(ConnectionError, match="no device memory"):
            expect(ours, "ready", 0)
        with pytest.raises(ConnectionError, match="ended before it was ready"):
            expect(ours, "ready", 0)


def test_processes_inherit_settings_and_no_secrets():
    """The command takes its keys from variables; a function never learns one."""
    secrets = ["SERVING_API_KEY", "SERVING_ADMIN_API_KEY", "SERVING_METRICS_KEY", "VLLM_API_KEY"]
    secrets += ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "TOKEN", "DB_PASSWORD"]
    secrets += ["openai_api_key"]
    settings = ["PATH", "TOKENIZERS_PARALLELISM", "JAX_PLATFORMS", "LD_LIBRARY_PATH", "MONKEY"]
    settings += ["JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY"]
    kept = processes.environment(dict.fromkeys([*secrets, *settings], "x"))
    assert kept == {**processes._ENVIRONMENT, **dict.fromkeys(settings, "x")}
    own = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    assert processes.environment(own).items() >= own.items()


def test_a_process_is_started_with_one_connection_and_without_secrets(monkeypatch):
    started = []

    def popen(command, *, pass_fds, env):
        started.append((command[1:], pass_fds, env))

    monkeypatch.setenv("SERVING_API_KEY", "secret")
    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    _, ours = processes.spawn("serving.functions.backbone")
    ours.close()
    ((command, (end,), env),) = started
    assert command == ["-m", "serving.functions.backbone", str(end)]
    assert "SERVING_API_KEY" not in env
    assert env["PATH"] == os.environ["PATH"]


def test_a_child_of_a_zygote_that_ended_has_no_connection_to_its_successors_child(monkeypatch):
    """The first zygote forks and ends before it says so: its child reads the end of its own."""
    children = []

    def zygote(control, number) -> None:
        send_header(control, {"ready": True})
        receive_header(control)
        children.extend(receive_fds(control, 1))
        if number:
            send_header(control, {"pid": 7})
            control.recv(1)
        control.close()

    def spawn(module):
        ours, theirs = socket.socketpair()
        threading.Thread(target=zygote, args=(theirs, len(started)), daemon=True).start()
        started.append(SimpleNamespace(wait=lambda seconds: 0, pid=1))
        return started[-1], ours

    started = []
    monkeypatch.setattr(processes, "spawn", spawn)
    one = Zygote()
    one.expect_ready()
    ours, pid = one.fork({})
    first, second = (socket.socket(fileno=fd) for fd in children)
    with ours, first, second:
        assert (pid, len(started)) == (7, 2)
        assert first.recv(1) == b""
        ours.send(b"x")
        assert second.recv(1) == b"x"
    one.close()


def test_a_process_is_waited_for_and_killed_if_it_stays():
    ends, ours, theirs = Ends(), *socket.socketpair()
    with theirs:
        leaves = subprocess.Popen(["cat"], stdin=theirs)  # until its connection ends
    ends.note(ours, leaves.pid)
    ours.close()
    ends.wait([ours])
    assert leaves.wait(0) == 0
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stays = subprocess.Popen(["sleep", "60"])
        ends.note(ours, stays.pid)
        ends.wait([ours, theirs], 0.01)  # of the other one nothing is known
        assert stays.wait(0) == -signal.SIGKILL


@pytest.mark.parametrize(("number", "logged"), [(errno.ESRCH, False), (errno.EMFILE, True)])
def test_a_process_that_cannot_be_held_is_told(number, logged, monkeypatch, caplog):
    def refuse(pid):
        raise OSError(number, "no")

    monkeypatch.setattr(processes.os, "pidfd_open", refuse)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        Ends().note(ours, 7)
    assert ("process 7 cannot be waited for" in caplog.text) is logged


class Child:
    """A process that leaves when it is killed."""

    pid = 7

    def __init__(self):
        self.killed = False

    def wait(self, seconds=None):
        if not self.killed and seconds is not None:
            raise subprocess.TimeoutExpired("zygote", seconds)
        return 0

    def kill(self):
        self.killed = True


def test_a_zygote_that_does_not_leave_is_killed_and_forks_no_more(monkeypatch):
    ours, theirs = socket.socketpair()
    child = Child()
    monkeypatch.setattr(processes, "spawn", lambda module: (child, ours))
    zygote = Zygote()
    assert zygote.pid == 7
    zygote.close()
    assert child.killed
    theirs.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        zygote.fork({})
    other = Child()
    zygote._process = other
    zygote.kill()
    assert other.killed


def test_a_process_that_cannot_be_spawned_leaves_no_connection(monkeypatch):
    def refuse(command, **given):
        assert command[1:3] == ["-m", "a.module"]
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(processes.subprocess, "Popen", refuse)
    with pytest.raises(OSError, match="no memory"):
        processes.spawn("a.module")  # an open socket would be a warning, and so an error


def stopped() -> subprocess.Popen:
    """Return a process that is stopped, as by SIGSTOP."""
    process = subprocess.Popen(["sleep", "600"])
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: processes._is_stopped(process.pid))
    return process


def test_a_process_that_stays_stopped_or_silent_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(processes, "_LOOK_S", 0.01)
    ours, theirs = socket.socketpair()
    with ours, theirs, stopped() as process:
        with pytest.raises(Stuck, match=rf"process {process.pid} is stopped \(SIGSTOP\)"):
            await_message(ours, process.pid)
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: not processes._is_stopped(process.pid))
        with pytest.raises(Stuck, match=rf"process {process.pid} has said nothing for 0.05 s"):
            expect(ours, "ready", process.pid, 0.05)
        send_header(theirs, {"ready": True})
        process.kill()
        process.wait()
        assert expect(ours, "ready", process.pid) == {"ready": True}
        theirs.sendall(bytes(4))
        ours.settimeout(0.05)
        with pytest.raises(Stuck, match="only a part"):
            expect(ours, "ready", process.pid)


def test_one_that_is_stopped_for_a_moment_is_waited_for(monkeypatch):
    """As by Ctrl-Z on a terminal, which stops the agent too."""
    states = itertools.cycle([True] * (processes._STOPPED_LOOKS - 1) + [False])
    looks = []
    ours, theirs = socket.socketpair()

    def is_stopped(pid):
        looks.append(pid)
        if len(looks) == 3 * processes._STOPPED_LOOKS:
            theirs.send(b"x")
        return next(states)

    monkeypatch.setattr(processes, "_LOOK_S", 0.001)
    monkeypatch.setattr(processes, "_is_stopped", is_stopped)
    with ours, theirs:
        await_message(ours, 7)
    assert looks == [7] * (3 * processes._STOPPED_LOOKS)


def test_a_zygote_that_is_stopped_is_killed_named_and_replaced(monkeypatch, caplog):
    """The first one is a process that reads nothing; its successor forks."""
    stuck, ends = stopped(), []

    def zygote(control) -> None:
        receive_header(control)
        ends.extend(receive_fds(control, 1))
        send_header(control, {"pid": 7})
        control.recv(1)
        control.close()

    def spawn(module):
        ours, theirs = socket.socketpair()
        send_header(theirs, {"ready": True})
        if not ends and stuck.poll() is None:
            ends.append(theirs.detach())  # which nobody reads
            return stuck, ours
        threading.Thread(target=zygote, args=(theirs,), daemon=True).start()
        return SimpleNamespace(wait=lambda seconds: 0, pid=1), ours

    monkeypatch.setattr(processes, "_LOOK_S", 0.01)
    monkeypatch.setattr(processes, "spawn", spawn)
    one = Zygote()
    one.expect_ready()
    ours, pid = one.fork({})
    ours.close()
    assert pid == 7
    assert stuck.wait(60) == -signal.SIGKILL
    assert f"process {stuck.pid} is stopped (SIGSTOP)" in caplog.text
    one.close()
    for end in ends:
        os.close(end)


def test_sends_fail_where_nobody_reads(monkeypatch):
    monkeypatch.setattr(processes, "SEND_S", 0.05)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        processes.bound_sends(ours)
        with pytest.raises(BlockingIOError) as raised:
            ours.sendall(bytes(1 << 22))
        assert is_stuck(raised.value)
        assert not is_stuck(ConnectionResetError())
        assert ours.gettimeout() is None  # reads still wait


def test_a_process_that_does_not_leave_is_killed_and_named(monkeypatch, caplog):
    monkeypatch.setattr(processes, "_LEAVE_S", 0.05)
    ends, (ours, theirs), process = Ends(), socket.socketpair(), stopped()
    with ours, theirs:
        ends.note(ours, process.pid)
        ends.see_off("law", process.pid, ours)
        assert process.wait(60) == -signal.SIGKILL
        wait_until(lambda: f"Process {process.pid} of 'law' has not left" in caplog.text)
        ends.see_off("law", process.pid, ours)  # it has ended: nothing is said
        assert caplog.text.count("has not left") == 1
