"""A process that forks servers and clients which a test may kill; one import for all of them.

Reads "serve WHERE RANK EP HOLD" and "push PATH EP" from its input; says "pid N" for each child, and
children say what they do: "listening WHERE", "held" when a server keeps the HOLD-th message without
an answer, "pushed" when a client has left a message. WHERE is a path, or a port for TCP. Children
die with their parent.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from support.cases.transport_cases import SECRET, exact_deltas, terms_of

from serving.lora_server.transport import shared_memory
from serving.lora_server.transport.header import Header, Kind
from serving.lora_server.transport.hosts import tcp
from serving.lora_server.transport.library import calls
from serving.lora_server.transport.serve import serve
from serving.lora_server.transport.shapes import PAGE
from serving.lora_server.transport.socket_messages import call

_PR_SET_PDEATHSIG = 1


class Peers:
    """The test's side of such a process."""

    def __init__(self):
        path = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[3])])
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        )
        self.expect("ready")

    def expect(self, word: str) -> list[str]:
        """Return the next line, which must begin with `word`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline().split()
        assert line[:1] == [word], (word, line)
        return line

    def start(self, *command) -> int:
        """Return the pid of a new child."""
        assert self._process.stdin is not None
        print(*command, file=self._process.stdin, flush=True)
        return int(self.expect("pid")[1])

    def kill(self, pid: int) -> None:
        """Kill a child and return when it is reaped."""
        os.kill(pid, signal.SIGKILL)
        assert self._process.stdin is not None
        print("reap", pid, file=self._process.stdin, flush=True)
        assert self.expect("ended")[1:] == [str(pid), str(int(signal.SIGKILL))]

    def close(self) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


def _serve(where: str, rank: str, ep: str, hold: str) -> None:
    terms, seen = terms_of(ep=int(ep)), []

    def compute(request):
        seen.append(request)
        if len(seen) == int(hold):
            _say("held")
            time.sleep(3600)
        return exact_deltas(request, terms.shapes)

    if where.isdigit():
        listening = tcp.listen("127.0.0.1", int(where))
        where = str(listening.getsockname()[1])
        server = tcp.open_server(listening, terms, int(rank), SECRET)
    else:
        server = shared_memory.open_server(where, terms, int(rank))
    _say("listening", where)
    serve(server, compute)


def _push(path: str, ep: str) -> None:
    """Leave one message, and die before anybody can answer it."""
    terms = terms_of(ep=int(ep))
    said = {"facts": terms.facts(0), "last_epoch": 0}
    _connection, answer, fds = call(path, said, num_fds=2)
    memory = mmap.mmap(fds[0], terms.shapes.channel_bytes)
    payload = terms.shapes.request_bytes(0, 2)
    header = Header(answer["epoch"], 1, 1, 0, 2, Kind.REQUEST, 3, payload)
    memory[PAGE : PAGE + 64] = header.pack()
    np.frombuffer(memory, np.uint64, 1)[0] = 1
    _say("pushed")
    time.sleep(3600)


def _say(*words) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def main() -> None:
    calls()
    _say("ready")
    parent = os.getpid()
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "reap":
            pid, status = os.waitpid(int(arguments[0]), 0)
            _say("ended", pid, os.WTERMSIG(status))
            continue
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(tell)
            os.read(told, 1)  # the end, once the parent has said who this is
            os.close(told)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                with contextlib.suppress(KeyboardInterrupt):
                    {"serve": _serve, "push": _push}[command](*arguments)
            os._exit(1)
        _say("pid", pid)
        os.close(told)
        os.close(tell)


if __name__ == "__main__":
    main()
