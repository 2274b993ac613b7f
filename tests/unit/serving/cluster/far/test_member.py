"""The process of a role elsewhere: told by its input, and ended with it."""

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.server_process import ROOT
from support.waiting import wait_until

from serving.cluster.far import member
from serving.cluster.far.switchboard import Switchboard

COMMAND = [sys.executable, "-m", "serving.cluster.far.member"]


ECHO = """
import sys

def echo(connection, suffix):
    while True:
        said = connection.recv_bytes()
        if said == b"ray?":
            said = str("ray" in sys.modules).encode()
        connection.send_bytes(said + suffix)
"""


def test_it_calls_the_function_with_connections_for_tickets(tmp_path, monkeypatch):
    (tmp_path / "told.py").write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    board = Switchboard("127.0.0.1")
    ours, ticket = board.ticket()
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, cwd=ROOT, env=env) as process:
        echo = importlib.import_module("told").echo
        process.stdin.write(member.call_bytes("echo-0", echo, (ticket, b" back")))
        process.stdin.flush()
        ours.send_bytes(b"there")
        assert ours.poll(60)
        assert ours.recv_bytes() == b"there back"
        ours.send_bytes(b"ray?")
        assert ours.recv_bytes() == b"False back"
        assert Path(f"/proc/{process.pid}/comm").read_text() == "echo-0\n"
        process.stdin.close()  # as when its actor ends
        assert process.wait(60) == member.EXIT_LOST
    board.close()
    ours.close()


def test_one_that_cannot_reach_the_commands_host_says_where_it_is():
    board = Switchboard("127.0.0.1")
    ours, ticket = board.ticket()
    board.close()
    call = member.call_bytes("instance-1", print, (ticket,))
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(COMMAND, cwd=ROOT, **pipes) as process:
        process.stdin.write(call)
        process.stdin.flush()
        said = process.stderr.read().decode()
        assert process.wait(60) == 1
    assert said.startswith(
        f"instance-1 cannot start. No connection to the command's host at 127.0.0.1:"
        f"{ticket.address[1]} ([Errno 111] Connection refused): its free ports must be open"
    )
    ours.close()


# It reads its input when it has asked the kernel: the pipe is empty from then on.
PARENT = """
import array, fcntl, struct, subprocess, sys, termios, time
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
child.stdin.write(struct.pack("<Q", 1))  # the size of what never comes
child.stdin.flush()
left = array.array("i", [1])
while left[0]:
    fcntl.ioctl(child.stdin.fileno(), termios.FIONREAD, left)
    time.sleep(0.01)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")
def test_the_kernel_ends_it_with_its_parent_even_when_it_is_stopped():
    command = [sys.executable, "-c", PARENT, *COMMAND]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        parent.kill()
    wait_until(lambda: not os.path.exists(f"/proc/{child}") or _is_zombie(child))


def _is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
