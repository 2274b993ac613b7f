"""Mixed traffic on a server for a long time, and samples of what its process holds."""

import contextlib
import dataclasses
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import processes
from fault_clients import NAMES, Clients, completion
from fault_cluster import FIXED
from fault_history import Recorder

_SAMPLE_S = 1.0
_BAD = (
    b"{",
    b"[" * 3000,
    b'{"prompt": "x", "max_tokens": -1}',
    b'{"prompt": [1.5, 1.5, 1.5]}',
    b'{"prompt": "x", "model": "nobody"}',
    b'{"prompt": "' + b"x" * 20_000 + b'"}',
    b'{"messages": []}',
)


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a process held at one time."""

    at_s: float
    rss_mb: float
    descriptors: int
    threads: int


@dataclasses.dataclass(frozen=True)
class Address:
    """A server on this machine."""

    port: int

    def connect(self, where: str, timeout: float) -> http.client.HTTPConnection:
        """Return a connection that is not open yet."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)


class Nuisance:
    """Clients that break off, send what is wrong, or connect and say nothing."""

    def __init__(self, port: int):
        self._port, self._stop = port, threading.Event()
        self.done = {"cancelled": 0, "bad": 0, "silent": 0}
        self._threads = [
            threading.Thread(target=run, args=(random.Random(seed),), daemon=True)
            for seed, run in enumerate((self._cancel, self._bad, self._silent))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(40)
            assert not thread.is_alive(), "a client hangs"

    def _cancel(self, choices: random.Random) -> None:
        names = ("base", *FIXED, *NAMES)
        while not self._stop.wait(0.2):
            body = completion(choices.choice(names), 0, 200, stream=True)
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            with contextlib.closing(connection), contextlib.suppress(OSError):
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(body), headers)
                connection.getresponse().read1(choices.randrange(1, 400))
                self.done["cancelled"] += 1

    def _bad(self, choices: random.Random) -> None:
        while not self._stop.wait(0.1):
            path = choices.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/x"))
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
            with contextlib.closing(connection), contextlib.suppress(OSError):
                headers = {"Content-Type": "application/json"}
                connection.request("POST", path, choices.choice(_BAD), headers)
                status = connection.getresponse().status
                assert status in (200, 400, 404, 413), status
                self.done["bad"] += 1

    def _silent(self, choices: random.Random) -> None:
        while not self._stop.wait(1.0):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self._port), 5) as quiet,
            ):
                quiet.sendall(choices.choice((b"", b"POST /v1/comp", b"GET /health HTTP/1.1\r\n")))
                self._stop.wait(0.5)
                self.done["silent"] += 1


def soak(pid: int, port: int, seconds: float, recorder: Recorder) -> tuple[list[Sample], Nuisance]:
    """Run the traffic for so long; return samples of the server's process."""
    clients, nuisance = Clients(Address(port), 1, recorder), Nuisance(port)
    samples: list[Sample] = []
    clients.start()
    nuisance.start()
    try:
        begun = time.monotonic()
        while (now := time.monotonic() - begun) < seconds:
            rss = processes.status_number(pid, "VmRSS") / 1024
            threads = processes.status_number(pid, "Threads")
            samples.append(Sample(now, rss, len(processes.descriptors(pid)), threads))
            time.sleep(_SAMPLE_S)
    finally:
        clients.stop()
        nuisance.stop()
    return samples, nuisance


def growth(samples: list[Sample], field: str) -> float:
    """Return how much a field grew from the second quarter to the last, by their medians."""
    values = [getattr(sample, field) for sample in samples]
    quarter = len(values) // 4
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])


@contextlib.contextmanager
def probing(port: int, found: list[float]):
    """Ask /health all the time meanwhile; afterwards `found` holds the longest answers."""
    script = Path(__file__).with_name("health_probe.py")
    command = [sys.executable, str(script), str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as probe:
        try:
            yield
        finally:
            probe.terminate()
            text, _ = probe.communicate(timeout=40)
            found += json.loads(text or "[]")
